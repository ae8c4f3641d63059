"""`titans export`: a trained run as a Hugging Face transformers folder."""

from __future__ import annotations

from pathlib import Path

import click

from titans_platform.cli import root_option
from titans_platform.errors import TitansError, UsageError


@click.command()
@click.argument("run")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@root_option
def export(run: str, folder: Path, root: Path) -> None:
    """Write RUN's model and tokenizer to FOLDER: config.json, model.safetensors, tokenizer.json.

    After `import titans_core.huggingface`, AutoModelForCausalLM.from_pretrained(FOLDER) loads it. RUN is a
    run's name (or a prefix of it), its folder, its MLflow run id, or the folder of one checkpoint.

    \b
    Example:
      titans export 3f2a91c0 my-model
    """
    from titans_core import LanguageModel
    from titans_core.pretrained import save_folder
    from titans_platform.data.tokenizer import write_tokenizer
    from titans_platform.runs.load import load_run

    model, tokenizer, cfg = load_run(run, root)
    if tokenizer is None or not isinstance(model, LanguageModel) or model.added:
        raise UsageError(
            f"{run}: its objective is {cfg.objective.kind}; only next_token models can be exported"
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder}: is not empty; give another folder")
    special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.bos, "pad_token_id": tokenizer.pad}
    try:
        save_folder(folder, model, special)
        write_tokenizer(tokenizer, folder)
    except OSError as error:
        raise TitansError(f"{folder}: cannot be written: {error.strerror}") from None
    for path in sorted(folder.iterdir()):
        click.echo(f"{path}  {path.stat().st_size:,} bytes")
