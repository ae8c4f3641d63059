"""Train arms of `titans adapt` with several seeds on one GPU, and measure each.

    python experiments/adapt/arms.py SOURCE novels_a.jsonl novels_b.jsonl.xz OUT --texts source.jsonl.xz

writes OUT/ARM-SEED, one folder a model, and the records of `measure.py` to OUT/records/ARM-SEED. What is
trained or measured is not done again; exit code 1: an arm failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARMS = {
    "delta-kept": ["--lora", "16"],
    "delta": ["--lora", "16", "--kept", "0"],
    "titans-kept": ["--lora", "16", "--memory", "titans"],
    "titans": ["--lora", "16", "--memory", "titans", "--kept", "0"],
    "kept": ["--lora", "16", "--layers", "none"],
    "window": ["--lora", "16", "--layers", "none", "--kept", "0"],
    "delta-frozen": ["--kept", "0"],
    "titans-frozen": ["--kept", "0", "--memory", "titans"],
    "delta-gates": ["--kept", "0", "--set", "objective.options.only_gates=true"],
    "titans-gates": ["--kept", "0", "--memory", "titans", "--set", "objective.options.only_gates=true"],
}
"""Options of `titans adapt`. frozen: the source's weights; gates: of the memories the gates alone."""
HERE = Path(__file__).parent


def run(given: argparse.Namespace, arm: str, seed: int) -> bool:
    """Train and measure an arm with a seed, unless the same commands did so; OUT/ARM-SEED.log has the output.

    Returns:
        True if it is measured.
    """
    name, threads = f"{arm}-{seed}", "1"
    environment = os.environ | {"OMP_NUM_THREADS": threads}
    out, records = given.out / name, given.out / "records" / name
    train = [
        sys.executable, "-m", "titans_platform", "adapt", given.source, out, "--data", given.data,
        "--length", given.length, "--rows", *given.steps, "--gpus", given.gpus, "--root", given.out / "runs",
        "--set", f"seed={seed}", "--set", f"optim.global_batch_size={given.batch}",
        "--set", f"optim.precision={given.precision}", *ARMS[arm],
    ]  # fmt: skip
    measure = [sys.executable, HERE / "measure.py", out]
    on = ["--device", "cuda" if given.gpus else "cpu", "--threads", threads, "--csv", records]
    on += ["--rows", given.rows]
    facts = ["--facts", given.facts, "--facts-seed", 21]
    commands = [train, [*measure, given.held_out, *on, *facts, "--length", given.length, "--name", name]]
    if given.longer:
        longer = ["--facts", 0, "--length", given.longer, "--name", f"{name}-long"]
        commands.append([*measure, given.held_out, *on, *longer])
    if given.texts:
        other = ["--facts", 0, "--length", given.length, "--name", f"{name}-source"]
        commands.append([*measure, given.texts, *on, *other])
    texts = [list(map(str, command)) for command in commands]
    done, commands_json = records / "commands.json", json.dumps(texts)
    if done.exists() and done.read_text() == commands_json:
        return True
    shutil.rmtree(records, ignore_errors=True)
    with (given.out / f"{name}.log").open("a", encoding="utf-8") as log:
        for text in texts:
            if subprocess.run(text, stdout=log, stderr=log, env=environment, check=False).returncode:
                return False
    done.write_text(commands_json)
    return True


def main() -> None:
    """Read the command line and run the arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("source", "data", "held_out"):
        parser.add_argument(name)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", help="other texts to measure on")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11, 12])
    parser.add_argument("--steps", nargs=2, type=int, default=[48, 100], help="of transfer and tune")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument(
        "--longer", type=int, default=8192, help="measure on rows of this length too; 0: do not"
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--facts", type=int, default=16, help="of each kind")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=1)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.at_once) as pool:
        pairs = [(arm, seed) for seed in given.seeds for arm in given.arms]
        running = {pair: pool.submit(run, given, *pair) for pair in pairs}
        for (arm, seed), each in running.items():
            print(f"{arm}-{seed}: {'measured' if each.result() else 'failed, see its log'}", flush=True)
    sys.exit(not all(each.result() for each in running.values()))


if __name__ == "__main__":
    main()
