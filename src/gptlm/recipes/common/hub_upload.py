"""`--push_to_hub`: a trained, merged or converted model in a repository of the HuggingFace hub.

Checked before the work begins (`open_repository`), uploaded after it. With `--hub_strategy every_save` another process
uploads the model of each checkpoint of a training meanwhile. Uploaded is what a stranger needs, without the paths of
this machine: the model, its tokenizer and card, results and report; no optimizer state, no logs, and nothing that
starts the run again.
"""

import html
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gptlm import owned
from gptlm.checkpoint import folder as checkpoint
from gptlm.config.args.hub import RepositoryArguments
from gptlm.config.run import Run
from gptlm.errors import GptlmError, UsageError, named, reason_of
from gptlm.model.hub import require_network
from gptlm.ranks import is_main_process
from gptlm.recipes.common.hooks import NO_HOOKS, Hooks
from gptlm.secret import HIDDEN
from gptlm.signals import not_held

logger = logging.getLogger(__name__)

STAGING = ".upload.incomplete"
REWRITTEN = re.compile(
    r"README\.md|report\.html|(adapter_|tokenizer_)?config\.json|(train|eval|test|all)_results\.json"
)
NOT_PUBLIC = ("*/*", ".*", "run*", "trainer_state.json", "results_of.json", "gptlm-error*")  # for `hf upload`
NEW_TOKEN = "https://huggingface.co/settings/tokens"
PROCESS = """
import sys
from huggingface_hub import upload_folder
repository, folder, revision, message = sys.argv[1:]
upload_folder(repo_id=repository, folder_path=folder, revision=revision or None, commit_message=message)
"""


class UploadFailed(GptlmError):
    """The run is complete, but its model is not on the hub."""


@dataclass(frozen=True)
class Upload:
    """A model that a command uploads.

    Attributes:
        folder: of the model.
        flag: the argument that names `folder`.
        texts: arguments of the command; the paths in them are not published.
        work: that is complete before the upload, "the run".
        message: of the commit.
    """

    hub: RepositoryArguments
    folder: Path
    flag: str
    texts: tuple[str, ...]
    work: str
    message: str


def upload_of(run: Run) -> Upload:
    """The upload of a training run."""
    values = [word for value in run.as_values().values() for word in (value if isinstance(value, list) else [value])]
    texts = tuple(text for text in values if isinstance(text, str))
    return Upload(run.hub, Path(run.training.output_dir or ""), "output_dir", texts, "the run", "End of training")


def open_repository(upload: Upload) -> tuple[HfApi, str]:
    """The repository of `--push_to_hub` by its full name, created if it does not exist, and who writes to it.

    Raises:
        GptlmError: if the hub cannot be reached, or the token may not write there.
    """
    hub, name = upload.hub, _name(upload)
    if constants.HF_HUB_OFFLINE:
        raise UsageError(
            f"{named('push_to_hub')} needs the network, and HF_HUB_OFFLINE is set; unset it, or leave "
            f"{named('push_to_hub')} out and run hf upload later"
        )
    with _asking("no token was found", "set HF_TOKEN in the environment"):
        token = hub.hub_token.value if hub.hub_token else get_token()
    if not token:
        raise GptlmError(
            f"{named('push_to_hub')} needs a token with write permission, and there is none; set HF_TOKEN in the "
            f"environment, or run hf auth login ({NEW_TOKEN} makes one)"
        )
    whose = f"the token of {named('hub_token')}" if hub.hub_token else f"the token of {_place_of_token()}"
    api = HfApi(token=token)
    with _asking(f"{named('push_to_hub')} cannot reach the hub", "try later, or leave the flag out", token):
        require_network()
    with _asking(f"the hub does not accept {whose}", f"make one with write permission on {NEW_TOKEN}", token):
        user = api.whoami()
    _check_user(user, name, whose)
    with _asking(f"the repository {name} cannot be created", f"give another {named('hub_model_id')}, or token", token):
        repository = api.create_repo(name, private=hub.hub_private_repo, exist_ok=True).repo_id
    with _asking(f"{whose} may not write to {repository}", f"make one with write permission on {NEW_TOKEN}", token):
        api.auth_check(repository, write=True)
    with _asking(f"the repository {repository} cannot be used", f"give another {named('hub_model_id')}", token):
        is_public = hub.hub_private_repo and not api.repo_info(repository).private
        if hub.hub_revision and not hub.hub_revision.startswith("refs/"):
            api.create_branch(repository, branch=hub.hub_revision, exist_ok=True)
    if is_public:
        raise GptlmError(
            f"{named('hub_private_repo')}: the repository {repository} exists and is public; make it private in its "
            f"settings on the hub, or give another {named('hub_model_id')}"
        )
    return api, repository


def check_upload(upload: Upload) -> str:
    """The address that the model will have on the hub. Raises as `open_repository`."""
    api, repository = open_repository(upload)
    address = f"{api.endpoint}/{repository}"
    logger.info("the model will be uploaded to %s", address)
    return address


@contextmanager
def uploading(run: Run, hooks: Hooks = NO_HOOKS) -> Iterator[Hooks]:
    """Around a training: the model is uploaded when it has ended, and before as `--hub_strategy` says.

    Args:
        hooks: of the caller.

    Yields:
        the hooks for the training.

    Raises:
        UploadFailed: after the block; the run is complete then.
    """
    if not (run.hub.push_to_hub and run.training.do_train and is_main_process()):
        yield hooks
        return
    uploads = CheckpointUploads(run)
    try:
        yield replace(hooks, callbacks=(*hooks.callbacks, uploads)) if _uploads_checkpoints(run) else hooks
        uploads.wait()
    finally:
        uploads.stop()
    upload = upload_of(run)
    _upload(upload, upload.folder / STAGING)


@contextmanager
def uploading_result(upload: Upload) -> Iterator[None]:
    """Around a command that makes the folder of `upload` as its result: uploaded at the end, checked before.

    Raises:
        GptlmError: as `open_repository`, before the block.
        UploadFailed: after the block; the result is complete then.
    """
    if not upload.hub.push_to_hub:
        yield
        return
    check_upload(upload)
    yield
    folder = upload.folder.resolve()
    _upload(upload, folder.with_name(f".{folder.name}{STAGING}"))


def _uploads_checkpoints(run: Run) -> bool:
    """Others could not load sharded checkpoints."""
    return run.hub.hub_strategy == "every_save" and run.training.checkpoint_format != "sharded"


def _upload(upload: Upload, staging: Path) -> None:
    """Upload the model, with the files to send in the new folder `staging`. Raises UploadFailed."""
    folder, hub = upload.folder, upload.hub
    logger.info("uploading the model in %s", folder)
    repository, token = hub.hub_model_id or _name(upload), ""
    try:
        api, repository = open_repository(upload)
        token = str(api.token)
        try:
            _stage(folder, staging, upload.texts)
            api.upload_folder(
                repo_id=repository, folder_path=staging, revision=hub.hub_revision, commit_message=upload.message
            )
        finally:
            owned.remove(staging.parent, staging.name)
            owned.end(staging.parent, [])  # no listing stays beside a result
    except Exception as error:  # see `_asking`
        words = ["hf", "upload", repository, str(folder), *(w for name in NOT_PUBLIC for w in ("--exclude", name))]
        words += ["--private"] if hub.hub_private_repo else []
        words += ["--revision", hub.hub_revision] if hub.hub_revision else []
        reason = error.marked if isinstance(error, GptlmError) else _reason(error, token)
        raise UploadFailed(
            f"{upload.work} is complete, but the model in {folder} could not be uploaded to {repository} ({reason}); "
            f"this uploads it: {shlex.join(words)}"
        ) from error
    logger.info("the model is on the hub: %s/%s", api.endpoint, repository)


class CheckpointUploads(TrainerCallback):
    """Uploads the model of each checkpoint while training continues, one at a time. A failure is a warning.

    Another process does it: it takes no time of the training's interpreter, and can be ended.
    """

    def __init__(self, run: Run):
        self.hub, self.upload = run.hub, upload_of(run)
        self.folder = self.upload.folder
        self.process: subprocess.Popen | None = None
        self.step, self.token = 0, ""
        self.target: tuple[HfApi, str] | None = None
        self.errors = tempfile.TemporaryFile()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.process is not None and self.process.poll() is None and not self.hub.hub_always_push:
            logger.info("the model of step %d is not uploaded: that of step %d still is", state.global_step, self.step)
            return
        with not_held():
            self.wait()
        saved = self.folder / f"checkpoint-{state.global_step}"
        if not saved.is_dir():
            return
        self.step = state.global_step
        try:
            self._start(saved)
        except (GptlmError, OSError) as error:
            logger.warning("the model of step %d is not uploaded: %s; training continues", self.step, reason_of(error))

    def _start(self, saved: Path) -> None:
        self.target = self.target or open_repository(self.upload)
        api, repository = self.target
        self.token = str(api.token)
        message = f"Training in progress, step {self.step}"
        staging = self.folder / STAGING
        _stage(saved, staging, self.upload.texts)
        self.errors.truncate(0)
        self.errors.seek(0)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, repository, str(staging), self.hub.hub_revision or "", message],
            env={**os.environ, "HF_TOKEN": self.token, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
        )

    def wait(self) -> None:
        """Wait for the upload that is going on, and say how it ended."""
        if self.process is None:
            return
        if self.process.poll() is None:
            logger.info("waiting for the upload of the model of step %d", self.step)
        code, self.process = self.process.wait(), None
        owned.remove(self.folder, STAGING)
        if code == 0:
            logger.info("the model of step %d is on the hub", self.step)
            return
        self.errors.seek(0)
        lines = self.errors.read().decode("utf-8", errors="replace").replace(self.token, HIDDEN).strip().splitlines()
        reason = lines[-1] if lines else f"exit code {code}"
        logger.warning("the model of step %d is not on the hub: %s", self.step, reason)

    def stop(self) -> None:
        """End the upload that is going on, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            owned.remove(self.folder, STAGING)
        self.errors.close()


def _name(upload: Upload) -> str:
    """The name of the repository as given, or that of the output folder. Raises UsageError."""
    given = upload.hub.hub_model_id
    name = given or upload.folder.absolute().name
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        shown = name if len(name) <= 100 else f"{name[:40]}... ({len(name)} characters)"
        reason = reason_of(error).partition(": '")[0]
        what = f"{named('hub_model_id')} {shown}" if given else f"the name of {named(upload.flag)}, {shown},"
        raise UsageError(f"{what} is no name of a repository: {reason}; give {named('hub_model_id')} NAME") from error
    return name


def _place_of_token() -> str:
    known = next((name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)), None)
    return f"the variable {known}" if known else "hf auth login"


def _check_user(user: dict[str, Any], name: str, whose: str) -> None:
    """Raises GptlmError if the token only reads, or its user does not belong to the owner of the repository."""
    role = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise GptlmError(f"{whose} may only read; make one with write permission on {NEW_TOKEN}")
    owner, has_owner, _ = name.partition("/")
    teams = {str(team.get("name")): team for team in user.get("orgs") or ()}
    if not has_owner or owner == user.get("name"):
        return
    if owner not in teams or teams[owner].get("roleInOrg") == "read":
        why = "may only read there" if owner in teams else "is no member"
        others = [str(user.get("name")), *(team for team in teams if team != owner)]
        raise GptlmError(
            f"{named('hub_model_id')} {name}: {user.get('name')}, whose token it is, {why}; give a repository of "
            f"{' or '.join(others)}"
        )


@contextmanager
def _asking(what: str, advice: str, token: str = "") -> Iterator[None]:
    """An error of the hub, or of the way to it, as one sentence."""
    try:
        yield
    except GptlmError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP library have many error types
        raise GptlmError(f"{what} ({_reason(error, token)}); {advice}") from error


def _reason(error: Exception, token: str) -> str:
    if isinstance(error, HfHubHTTPError):
        said = error.server_message or error.response.reason_phrase
        reason = f"{error.response.status_code} {' '.join(str(said).split())}".strip()
    else:
        reason = reason_of(error)
    return reason.replace(token, HIDDEN) if token else reason


def _stage(source: Path, staging: Path, texts: Iterable[str]) -> None:
    """Make the folder `staging` with the files of `source` to upload: links, and texts without local paths.

    Args:
        texts: arguments of the command, which may hold local paths.
    """
    checkpoint.start(staging)
    paths = _local_paths(source, texts)
    for path in source.iterdir():
        is_public = owned.MODEL_FILE.fullmatch(path.name) or REWRITTEN.fullmatch(path.name)
        if not (is_public or path.suffix == ".gguf") or not path.is_file():
            continue
        if REWRITTEN.fullmatch(path.name):
            text = path.read_text(encoding="utf-8", errors="replace")
            for local in paths:
                text = text.replace(f"{local}/", "")
            (staging / path.name).write_text(text, encoding="utf-8")
            continue
        try:
            os.link(path, staging / path.name)
        except OSError:  # a file system without links
            shutil.copyfile(path, staging / path.name)


def _local_paths(source: Path, texts: Iterable[str]) -> list[str]:
    """Folders of this machine that texts may name, each before those that contain it, as JSON and HTML write them."""
    given = [Path(word) for text in texts for word in text.split() if word.startswith("/")]
    given += [source.absolute(), source.absolute().parent]
    folders = {Path.cwd(), Path.home(), *(path.parent for path in given), *(path.resolve().parent for path in given)}
    found = sorted((str(folder) for folder in folders if folder != Path("/")), key=len, reverse=True)
    return [form for text in found for form in dict.fromkeys([text, json.dumps(text)[1:-1], html.escape(text)])]
