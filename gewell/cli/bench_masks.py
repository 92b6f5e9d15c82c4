"""What it costs that answers keep to a JSON schema."""

import typer


def masks(
    model: str = typer.Option("gewell-nano", help="A stored model's name, or a folder with a tokenizer."),
    rows: int = typer.Option(64, min=1, max=512, help="Constrained rows side by side."),
    tokens: int = typer.Option(24, min=8, help="Tokens decoded per row and turn."),
    device: str = typer.Option("cpu", help="cpu or cuda."),
) -> None:
    """What it costs that answers keep to a JSON schema: decode steps with masks beside steps without."""
    from gewell.engine.bench_masks import measure
    from gewell.model_store import model_path

    report = measure(model_path(model), device=device, rows=rows, num_tokens=tokens)
    typer.echo(
        f"{report.model} on {report.device}, {report.num_threads} threads, {report.rows} rows, "
        f"vocabulary of {report.vocab_size}: {report.free_step_ms:.2f} ms a step, with masks "
        f"{report.constrained_step_ms:.2f} ms ({report.share:+.1%}); vocabulary read in {report.vocabulary_s:.2f} s, "
        f"schema compiled in {report.compile_ms:.1f} ms"
    )
