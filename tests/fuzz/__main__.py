"""`python -m tests.fuzz COUNT [SEED [COMMAND ...]]` runs cases and groups findings; `... JSON` runs one case."""

import sys
import time
from collections import Counter

from tests.fuzz.cases import Case, draw_cases
from tests.fuzz.session import Session, started
from tests.fuzz.workers import kind_of


def run_many(session: Session, count: int, number: int, commands: list[str]) -> None:
    files = {name: found for name, found in session.files.items() if not commands or name in commands}
    start, kinds, codes, slow = time.monotonic(), Counter(), Counter(), []
    for case, ended in session.run(draw_cases(count, number, files)):
        codes[ended.code] += 1
        slow.append((ended.seconds, case.as_json()))
        if not ended.faults:
            continue
        kind = kind_of(ended)
        kinds[kind] += 1
        if kinds[kind] == 1:
            print(
                f"\n{kind}\n  {'; '.join(ended.faults)}\n  {ended.stderr.strip()[:600]}\n  {case.as_json()}", flush=True
            )
    print(f"\n{len(slow)} cases in {time.monotonic() - start:.0f} s, exit codes {dict(codes)}, findings by kind:")
    for kind, times in kinds.most_common():
        print(f"{times:4} {kind}")
    print("slowest:")
    for seconds, text in sorted(slow)[-8:]:
        print(f"{seconds:.1f} s {text[:300]}")


def run_some(session: Session, texts: list[str]) -> None:
    for case, ended in session.run(map(Case.from_json, texts)):
        print(f"gptlm {case.line}\nexit code {ended.code}, {ended.seconds:.1f} s, {ended.faults or 'no fault'}")
        print(f"{ended.stdout}--- stderr\n{ended.stderr}{ended.log}")


if __name__ == "__main__":
    with started() as current:
        if sys.argv[1].startswith("{"):
            run_some(current, sys.argv[1:])
        else:
            run_many(current, int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, sys.argv[3:])
