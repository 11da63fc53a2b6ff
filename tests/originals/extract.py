"""Reduce the raw recordings of `../shared/cases` to the files of `tests/golden`.

`python -m tests.originals.extract` writes them. Every number is copied; nothing is computed but SHA-256 sums of
recorded files.
"""

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import yaml

from tests.conftest import ROOT
from tests.golden import GOLDEN

CASES = ROOT.parent / "shared" / "cases"
SPLITS = ("train", "valid", "test")
HEAD = 8  # numbers of an index that are written out, so that a failure shows where it begins
RESOLVED = {  # keys of FleetX that have one counterpart here
    "Global": ("local_batch_size", "global_batch_size", "micro_batch_size", "seed"),
    "Engine": ("accumulate_steps", "max_steps"),
    "Model": ("hidden_size", "num_layers"),
    "Distributed": ("mp_degree", "pp_degree"),
}


def load(name: str):
    return json.loads((CASES / name).read_text())


def index(record: dict) -> dict:
    head = {"head": record["head"][:HEAD]} if "head" in record else {}
    return {"dtype": record["dtype"], **head, "sha256": record["sha256"]}


def file_sums(prefix: str) -> dict[str, str]:
    return {name: sha256((CASES / f"{prefix}.{name}").read_bytes()).hexdigest() for name in ("bin", "idx")}


def paddlenlp_orders() -> list[dict]:
    names = {"doc_idx": "documents", "sample_idx": "samples", "shuffle_idx": "shuffle"}
    names |= {"dataset_index": "parts", "dataset_sample_index": "part_samples"}
    expected = load("paddlenlp/expected.json")
    cases = []
    for case in load("paddlenlp/cases.json"):
        corpora = [word.removeprefix("{R}/") for word in case["files"]]
        given = {"id": case["id"], "input": corpora, "split": case["split"], "num_samples": case["nums"]}
        given |= {"seq_length": case["seq"], "seed": case["seed"]}
        for split, found in expected[case["id"]].items():
            given[split] = found and {
                "len": found["len"],
                **{names[name]: index(found[name]) for name in names if name in found},
                "tokens_sha256": found["tokens_sha256"],
            }
        cases.append(given)
    return cases


def megatron_orders() -> dict:
    corpora = {}
    for name in "ac":
        prefix = f"megatron/corpus_{name}_text_document"
        content = (CASES / f"{prefix}.idx").read_bytes()
        count = int(np.frombuffer(content, "<u8", 1, 18)[0])  # magic 9, version 8, dtype code 1
        corpora[name] = {"sizes": np.frombuffer(content, "<i4", count, 34).tolist(), **file_sums(prefix)}
    expected = {
        "megatron": load("megatron/expected_old_relaxed_assert.json")["cases"],
        "megatron-core": load("megatron/expected_new.json")["cases"],
    }
    cases = []
    for case in load("megatron/cases.json")["cases"]:
        given = {"id": case["id"], "input": case["prefix"][len("corpus_")], "split": case["split"]}
        given |= {"num_samples": case["sizes"], "seq_length": case["seq_length"], "seed": case["seed"]}
        for data_order, found in expected.items():
            record = found[case["id"]]
            if "splits" not in record:
                given[data_order] = record["error"].split()[0].rstrip(":")  # "abort" or "hang"
                continue
            given[data_order] = {"bounds": record["split_bounds"]} if "split_bounds" in record else {}
            for split in SPLITS:
                given[data_order][split] = (part := record["splits"].get(split)) and {
                    **{name: part[name] for name in ("len", "first_document", "num_documents") if name in part},
                    **({"epochs": part["num_epochs"]} if "num_epochs" in part else {}),
                    "documents": index(part["document_index"]),
                    "samples": index(part["sample_index"]),
                    "shuffle": index(part["shuffle_index"]),
                    "tokens_sha256": part["samples_sha256"],
                }
        cases.append(given)
    return {"corpora": corpora, "cases": cases}


def megatron_preprocess() -> dict:
    folder = "megatron/preprocess"
    content = (CASES / folder / "new_eod_text_document.idx").read_bytes()
    count = int(np.frombuffer(content, "<u8", 1, 18)[0])
    starts = np.frombuffer(content, "<i8", offset=34 + 12 * count)  # one more than documents
    content = (CASES / folder / "old_noeod_text_document.idx").read_bytes()
    sizes = np.frombuffer(content, "<i4", count, 34)
    tokens = np.frombuffer((CASES / folder / "old_noeod_text_document.bin").read_bytes(), "<u2")
    sequences = np.split(tokens, np.cumsum(sizes)[:-1])
    documents = [sequences[start].tolist() if size else [] for start, size in zip(starts, np.diff(starts))]
    names = ("old_eod", "old_noeod", "old_lazy", "new_eod")
    return {"documents": documents, "files": {name: file_sums(f"{folder}/{name}_text_document") for name in names}}


def megatron_learning_rates() -> dict:
    cases = {}
    for name, case in load("megatron/lr_schedules.json")["cases"].items():
        assert case["megatron_old_AnnealingLR"] == case["megatron_core_OptimizerParamScheduler"]
        args = {name: case["args"][name] for name in ("style", "lr", "min_lr", "decay_iters", "warmup_fraction")}
        cases[name] = args | {"megatron": case["megatron_old_AnnealingLR"], "oneflow": case["oneflow"]}
    return cases


def megatron_evaluation() -> dict:
    found = load("megatron/zeroshot_eval.json")
    windows = []
    for case in found["wikitext_windows"]:
        shown = [window if window["scored"] else {"scored": []} for window in case["first_windows"]]
        windows.append(case | {"first_windows": shown})
        assert windows[-1].pop("every_target_exactly_once")
    return {"windows": windows, "perplexities": found["adjusted_ppl"]}


def fleetx_orders() -> dict:
    found = load("fleetx/dataset_order.json")
    names = {"version": "version", "corpus": "input", "mode": "mode", "split": "split", "num_samples": "num_samples"}
    names |= {"seq": "seq_length", "seed": "seed", "splits": "bounds"}
    names |= {"doc_idx": "documents", "sample_idx": "samples", "shuffle_idx": "shuffle"}
    cases = [{new: case[old] for old, new in names.items()} for case in found["cases"]]
    return {"sizes": [corpus["lens"] for corpus in found["corpora"]], "cases": cases}


def fleetx_learning_rates() -> dict:
    tables = {case["case"].split()[0]: case["table"] for case in load("fleetx/lr_tables.json")}
    return {name: {update: list(rates.values()) for update, rates in table.items()} for name, table in tables.items()}


def fleetx_keys() -> dict[str, list[str]]:
    """The names of the keys of each generation's files, without what the files say."""
    return {
        folder.name: sorted(
            {key for file in folder.rglob("*.yaml") for key in keys_of(yaml.safe_load(file.read_text()))}
        )
        for folder in sorted((CASES / "fleetx" / "yaml").iterdir())
    }


def keys_of(section: dict, prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict) and key != "skip_tensor_map":  # whose keys are names of layers
            yield from keys_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def paddlenlp_flags() -> dict[str, dict[str, list[str]]]:
    """The names of the flags of each pretraining command and argument file, without their values."""
    found: dict[str, dict[str, list[str]]] = {"command": {}, "json": {}}
    for case in load("paddlenlp/commands.json"):
        if case["script"].startswith("run_pretrain"):
            words = json.loads(case["text"]) if case["kind"] == "json" else re.findall(r"--(\w+)", case["text"])
            found["json" if case["kind"] == "json" else "command"][case["id"]] = list(words)
    return found


def fleetx_overrides() -> list[dict]:
    cases = []
    for case in load("fleetx/overrides.json"):
        given = {"file": case["file"].removeprefix("ppfleetx/configs/nlp/gpt/").removesuffix(".yaml")}
        given |= {"overrides": case["overrides"], "world_size": case["world_size"]}
        if "error" in case:
            given["error"] = case["error"]["message"]
        else:
            sections = case["resolved"]
            given["resolved"] = {
                f"{section}.{key}": sections[section][key]
                for section, keys in RESOLVED.items()
                for key in keys
                if sections.get(section, {}).get(key) is not None
            }
        cases.append(given)
    return cases


FILES = {
    "paddlenlp/orders.json": paddlenlp_orders,
    "paddlenlp/flags.json": paddlenlp_flags,
    "megatron/orders.json": megatron_orders,
    "megatron/preprocess.json": megatron_preprocess,
    "megatron/learning_rates.json": megatron_learning_rates,
    "megatron/evaluation.json": megatron_evaluation,
    "fleetx/orders.json": fleetx_orders,
    "fleetx/learning_rates.json": fleetx_learning_rates,
    "fleetx/keys.json": fleetx_keys,
    "fleetx/overrides.json": fleetx_overrides,
}


def text_of(value, indent: str = "", used: int = 0) -> str:
    """JSON of at most 120 characters a line; what fits there stands on one. `used`: characters before the value."""
    line = json.dumps(value)
    if used + len(line) < 120 or not isinstance(value, (dict, list)):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        items = [
            f"{inner}{json.dumps(key)}: {text_of(item, inner, used=len(inner + key) + 4)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if any(isinstance(item, dict) or (isinstance(item, list) and len(item) > 9) for item in value):
        return "[\n" + ",\n".join(inner + text_of(item, inner, used=len(inner)) for item in value) + f"\n{indent}]"
    rows = [""]
    for item in map(json.dumps, value):
        if len(inner + rows[-1] + item) > 118 and rows[-1]:
            rows.append("")
        rows[-1] += f"{item}, "
    return "[\n" + "\n".join(inner + row.rstrip() for row in rows).removesuffix(",") + f"\n{indent}]"


def main(folder: Path = GOLDEN) -> None:
    for name, recorded in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text_of(recorded()) + "\n")
    sums = {name: sha256((folder / name).read_bytes()).hexdigest() for name in sorted(FILES)}
    (folder / "SHA256SUMS").write_text("".join(f"{value}  {name}\n" for name, value in sums.items()))


if __name__ == "__main__":
    main()
