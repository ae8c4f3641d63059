"""`titans adapt`: a pretrained transformers model with a memory, converted and trained in two stages."""

from __future__ import annotations

import json
import struct
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from titans_platform.cli import (
    OSPath,
    bucket_tables,
    dry_run_option,
    echo_json,
    from_options,
    json_option,
    measures_table,
    root_option,
    set_option,
)
from titans_platform.errors import UsageError, one_line, within
from titans_platform.files import read_json, write_text
from titans_platform.text import clock, plain_console, render

if TYPE_CHECKING:
    from titans_core.adapt import MemoryOptions
    from titans_platform.config import RunConfig

STAGES = {"transfer": 3e-3, "tune": 1e-3}
"""Objectives of the runs, in order, and their learning rates."""
DEFAULT_KEPT = 192
"""Tokens that a layer of a new model keeps."""
RUN_FILE = Path(__file__).with_name("adapt.yaml")
LAYERS: dict[str, list[int | str] | None] = {"all": None, "none": []}


@click.command()
@click.argument("source")
@click.argument("out", type=OSPath(file_okay=False, path_type=Path))
@click.option("--data", metavar="FILE", help="Text to train on: file, folder or glob  [default: the corpus]")
@click.option(
    "--memory", "kind", type=click.Choice(["delta", "titans"]), default="delta", help="Kind of memory."
)
@click.option("--window", type=click.IntRange(1), default=256, help="Tokens that attention sees.")
@click.option("--sinks", type=click.IntRange(0, 64), default=4, help="First tokens that it always sees.")
@click.option("--layers", metavar="I,J,...", default="all", help="Layers with a memory: all, none, or these.")
@click.option("--heads", type=click.IntRange(1), default=1, help="Memories per query head.")
@click.option("--depth", type=click.IntRange(1), default=2, help="Layers of a titans memory.")
@click.option("--chunk", type=click.IntRange(1), default=64, help="Chunk of a titans memory.")
@click.option("--kept", type=click.IntRange(0), help=f"Tokens that a layer keeps  [default: {DEFAULT_KEPT}]")
@click.option("--lora", type=click.IntRange(0), default=0, metavar="RANK", help="Tune attention too (LoRA).")
@click.option("--length", type=click.IntRange(2), default=2048, help="Tokens per training row.")
@click.option("--rows", nargs=2, type=click.IntRange(1), default=(48, 60), help="Rows of transfer and tune.")
@click.option("--threads", type=click.IntRange(1), default=1, help="CPU threads to train with.")
@click.option("--gpus", type=click.IntRange(0, 1), default=0, help="GPUs to train on.")
@set_option
@root_option
@dry_run_option
@json_option
def adapt(
    source: str, out: Path, data: str | None, layers: str, kept: int | None, lora: int, length: int,
    rows: tuple[int, int], threads: int, gpus: int, overrides: tuple[str, ...], root: Path, dry_run: bool,
    as_json: bool, **memory: Any,
) -> None:  # fmt: skip
    """Write SOURCE with a window and a trained memory of constant size to the folder OUT.

    SOURCE is a transformers folder, a Hub name or a GGUF file of the Llama, Qwen2, Qwen3 or GPT-2 family; its
    weights stay as they are. Two runs train the memories: transfer, on the attention of each layer, then
    tune, on the model's distribution. Their run files are in OUT and may be edited; the same command resumes
    them. A copy of tune.yaml with other text, rows, seed or kept tokens, named tune-2.yaml, is a further run.
    After `import titans_core.adapt`, AutoModelForCausalLM.from_pretrained(OUT) loads the model.

    \b
    Example:
      titans adapt HuggingFaceTB/SmolLM2-135M-Instruct my-model --data books/ --dry-run
      titans adapt HuggingFaceTB/SmolLM2-135M-Instruct my-model --data books/
    """
    import torch

    from titans_core.adapt import MemoryOptions, change_kept
    from titans_platform.config import SourceConfig
    from titans_platform.data.sources import FilesSource

    if gpus and not torch.cuda.is_available():
        raise UsageError("--gpus: this machine has no GPU that torch can use; leave it out")
    if lora and find_spec("peft") is None:
        raise UsageError("--lora: peft is not installed; pip install peft, or leave it out")
    chosen = click.get_current_context().get_parameter_source
    for name in ("depth", "chunk"):
        if memory["kind"] == "delta" and chosen(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name}: works only with --memory titans")
    if layers == "none" and not lora:
        raise UsageError("--layers: none, and without --lora there is nothing to train; give --lora 16")
    if saved := read_json(out / "adapt.json") or {}:
        # an older version may have saved fewer options
        saved = MemoryOptions().model_dump(mode="json") | saved
    if kept is None:
        kept = saved.get("kept", DEFAULT_KEPT)
    options = from_options(MemoryOptions, layers=_parse_layers(layers), kept=kept, **memory)
    source = str(Path(source).resolve()) if Path(source).exists() else source
    settings = options.model_dump(mode="json") | {"source": source, "lora": lora, "length": length}
    settings |= {"data": data and str(Path(data).resolve()), "rows": list(rows), "threads": threads}
    console = plain_console(stderr=as_json)
    if not saved:
        if data is not None:
            FilesSource(SourceConfig(kind="files", path=data), "--data", Path()).files()
        if out.is_dir() and any(out.iterdir()):
            raise UsageError(f"{out}: is not empty; give another folder")
    else:
        _check_settings(out, settings, saved)
        if not dry_run:
            change_kept(out, options.kept)
            write_text(out / "adapt.json", json.dumps(settings, indent=2))
    with TemporaryDirectory(prefix="titans-adapt-") if dry_run and not saved else nullcontext(out) as folder:
        folder = Path(folder)
        if not saved:
            _convert(source, folder, options, settings)
        if dry_run:
            planned = {stage: _plan(cfg, gpus, console) for stage, cfg in _stages(folder, overrides).items()}
            if as_json:
                echo_json(planned)
            return
        result = _train(folder, root, overrides, gpus, console)
    if as_json:
        echo_json(result)


def _check_settings(out: Path, settings: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise UsageError if the model in OUT was converted with other settings.

    The number of kept tokens may differ: these have no weights, and run files have the number to train with.
    """
    for name in (name for name in settings if name != "kept" and saved.get(name) != settings[name]):
        option = {"kind": "--memory", "source": "SOURCE"}.get(name, f"--{name}")
        show = _format_layers if name == "layers" else str
        cause = f"{show(settings[name])}, but {out} was converted with {show(saved.get(name))}"
        remedy = "give another folder, or edit rows, text or threads in its run files"
        raise UsageError(f"{option}: {cause}; {remedy}")


def _convert(source: str, out: Path, options: MemoryOptions, settings: dict[str, Any]) -> None:
    """Write the model with untrained memories, its tokenizer, and the run files."""
    import transformers

    from titans_core.adapt import convert
    from titans_core.pretrained import MODEL_TYPE
    from titans_platform.data.tokenizer import load_tokenizer

    path, gguf = Path(source).expanduser(), {}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"{source}: no such file")
        source, gguf = str(path.parent), {"gguf_file": path.name}
    elif path.is_file():
        raise UsageError(f"{source}: is a file; give a folder of transformers or a .gguf file")
    elif (read_json(path / "config.json") or {}).get("model_type") == MODEL_TYPE:
        raise UsageError(f"{source}: written by titans export; give a Llama, Qwen2, Qwen3 or GPT-2")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto", **gguf)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **gguf)
    except (ImportError, OSError, ValueError, struct.error) as error:
        raise UsageError(f"{source}: cannot be loaded by transformers: {one_line(error)}") from None
    with within(f"{source}: ", ValueError, ""):
        adapted = convert(model, options)
    config, weights = adapted.config, adapted.source_hash()
    # with changes of its weights OUT is another model, and the runs start from this one
    base = out / "base" if settings["lora"] else out
    for folder in {base, out}:
        adapted.save_pretrained(folder)
    tokenizer.save_pretrained(out)
    if not (out / "tokenizer.json").is_file():
        raise UsageError(f"{source}: its tokenizer cannot be written as a tokenizer.json")
    # the platform counts special tokens that a tokenizer lacks, such as padding
    vocabulary = max(config.vocab_size, load_tokenizer(str(out / "tokenizer.json")).vocab_size)
    paths = {"base": str(base.resolve()), "tokenizer": str((out / "tokenizer.json").resolve())}
    values = {"settings": settings, "kept": options.kept, "config": config, "weights": weights} | paths
    rows = dict(zip(STAGES, settings["rows"], strict=True))
    for stage in _first_stages(settings):
        run = {"stage": stage, "steps": rows[stage], "lr": STAGES[stage], "vocabulary": vocabulary}
        (out / f"{stage}.yaml").write_text(render(RUN_FILE, **run, **values), encoding="utf-8")
    # last: a folder without it is not whole
    write_text(out / "adapt.json", json.dumps(settings, indent=2))


def _parse_layers(text: str) -> list[int | str] | None:
    """Return the numbers of layers; the validation refuses what is no number."""
    return LAYERS[text] if text in LAYERS else [int(i) if i.isdecimal() else i for i in text.split(",")]


def _format_layers(layers: list[int] | None) -> str:
    """Return layers as `--layers` takes them."""
    names = {str(value): name for name, value in LAYERS.items()}
    return names.get(str(layers)) or ",".join(map(str, layers or ()))


def _first_stages(settings: dict[str, Any]) -> list[str]:
    """Return the stages of a new model; without memories there is no transfer, which trains nothing else."""
    return ["tune"] if settings.get("layers") == [] else [*STAGES]


def _stages(folder: Path, overrides: tuple[str, ...]) -> dict[str, RunConfig]:
    """Load the run files of a folder by name, in the order of the runs. Raises UsageError."""
    from titans_platform.loading import load_config

    further = sorted((path.stem for path in folder.glob("tune-*.yaml")), key=lambda name: (len(name), name))
    first = _first_stages(json.loads((folder / "adapt.json").read_text(encoding="utf-8")))
    return {name: load_config(folder / f"{name}.yaml", overrides) for name in [*first, *further]}


def _plan(cfg: RunConfig, gpus: int, console: Console) -> dict[str, Any]:
    """Time one step of a run on random tokens, on a GPU the second one, and show the run's cost."""
    import torch

    from titans_platform.objectives import build_objective
    from titans_platform.runs.check import sample_trainer
    from titans_platform.runs.execute import peak_rss
    from titans_platform.training.loop import deterministic

    build_objective(cfg).check()
    with deterministic(cfg.seed, cfg.threads):
        trainer = sample_trainer(cfg, "cuda" if gpus else "cpu")
        assert trainer, "both stages have sample rows"
        if gpus:  # which compiles the kernels
            trainer.step()
        start = time.perf_counter()
        trainer.step()
        seconds = (time.perf_counter() - start) * cfg.optim.steps
    peak = torch.cuda.max_memory_allocated() if gpus else peak_rss()
    model, length = trainer.model, cfg.data.sequence_length
    planned = {"parameters": model.num_parameters(), "state_bytes": model.state_bytes(length)}
    planned |= {"steps": cfg.optim.steps, "tokens": cfg.tokens, "seconds": seconds, "peak_bytes": peak}
    console.print(
        f"{cfg.objective.kind}: {cfg.optim.steps} steps, {cfg.tokens:,} tokens, {planned['parameters']:,} "
        f"parameters, state of {planned['state_bytes']:,} bytes; {clock(seconds)}, {peak / 2**30:.1f} GiB "
        "by one step here", soft_wrap=True,
    )  # fmt: skip
    return planned


def _train(out: Path, root: Path, overrides: tuple[str, ...], gpus: int, console: Console) -> dict[str, Any]:
    """Run all stages, each from its last checkpoint, and write the memories into the model after each."""
    from titans_platform.cli.live import preparing, train_run
    from titans_platform.objectives import build_objective
    from titans_platform.objectives.adapt import export
    from titans_platform.runs.load import find_checkpoint, prepared_spec
    from titans_platform.runs.spec import Resources

    runs, before, result = {}, None, None
    for stage, cfg in _stages(out, overrides).items():
        cfg = cfg.model_copy(update={"start_from": before})
        objective = build_objective(cfg)
        objective.check()
        resources = Resources(workers=1, cpus_per_worker=cfg.threads, gpus_per_worker=gpus)
        with preparing(console) as progress:
            spec = prepared_spec(cfg, root, resources, progress=progress)
        assert spec
        result = train_run(spec, root, f"{out.name} {stage}", console)
        before = str(spec.folder.path)
        runs[stage] = result.record()
        export(objective, find_checkpoint(before, root), out)
        settings = json.loads((out / "adapt.json").read_text(encoding="utf-8"))
        settings["run"] = str(spec.folder.path.resolve())
        write_text(out / "adapt.json", json.dumps(settings, indent=2))
        console.print(
            f"{stage}: run {result.cell}, {result.tokens:,} tokens, {result.train_seconds:.0f} s, final loss "
            f"{result.final_train_loss:.4f} {objective.loss_unit}", soft_wrap=True,
        )  # fmt: skip
    assert result
    console.print(measures_table(result), *bucket_tables(result))
    console.print(f"model {out}", soft_wrap=True)
    return runs


@click.command()
@click.argument("folder", metavar="MODEL", type=OSPath(path_type=Path))
@click.option("--session", metavar="NAME", default="default", help="Session to continue or start.")
@click.option("--say", metavar="TEXT", help="One message  [default: each line of stdin]")
@click.option("--max-new-tokens", type=click.IntRange(1), default=200, help="Maximum tokens of a reply.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Sampling seed.")
@click.option("--list", "listed", is_flag=True, help="List all sessions, and do nothing else.")
@click.option("--fork", metavar="NEW", help="Copy the session to NEW.")
@click.option("--rollback", type=click.IntRange(0), metavar="TURN", help="Delete the turns after TURN.")
@click.option("--delete", is_flag=True, help="Delete the session.")
def chat(
    folder: Path, session: str, say: str | None, max_new_tokens: int, temperature: float, seed: int,
    listed: bool, fork: str | None, rollback: int | None, delete: bool,
) -> None:  # fmt: skip
    """Chat with MODEL, a folder of `titans adapt`, in a session whose memory is kept between calls.

    A turn is what you say and the reply; each is a memory file in MODEL/sessions, whose hash is shown. The
    size of a session does not grow, and its text is not kept.

    \b
    Example:
      titans chat my-model --session anna --say Hello
      titans chat my-model --session anna --fork bert
      titans chat my-model --session anna --rollback 1
    """
    from titans_core import Sampling
    from titans_core.adapt import Chat

    sampling = from_options(Sampling, temperature=temperature, seed=seed)
    options = {"--say": say, "--fork": fork, "--rollback": rollback}
    options |= {"--list": listed or None, "--delete": delete or None}
    chosen = [name for name, value in options.items() if value is not None]
    if len(chosen) > 1:
        raise UsageError(f"{', '.join(chosen)}: exclude each other; give one of them")
    with within(f"{folder}: ", ValueError, ""):
        chatbot = Chat(folder)
        sessions = chatbot.sessions
        if fork is not None:
            sessions.fork(session, fork)
        elif rollback is not None:
            sessions.rollback(session, rollback)
        elif delete:
            sessions.delete(session)
        elif not listed:
            for line in sys.stdin if say is None else [say]:
                for piece in chatbot.say(session, line.rstrip("\n"), max_new_tokens, sampling):
                    click.echo(piece, nl=False)
                click.echo()
        damaged = []
        for name in sessions.names() if listed else [fork or session]:
            try:
                turns = sessions.turns(name)
            except ValueError as error:  # the other sessions are listed first
                damaged.append(error)
                continue
            for turn in turns[0 if listed else -1 :]:
                line = f"{name}, turn {turn.number}: {turn.tokens:,} tokens, memory {turn.hash}"
                click.echo(line, err=not listed)
        if damaged:
            raise damaged[0]
