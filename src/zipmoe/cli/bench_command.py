"""``zipmoe bench``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zipmoe.bench.ended_by_signals import ended_by_signals
from zipmoe.cli.bench_kernels import bench_kernels
from zipmoe.cli.progress import talk

if TYPE_CHECKING:
    from zipmoe.bench.benchmark import BenchmarkPlan, Measured
    from zipmoe.bench.prompts import PromptSet
    from zipmoe.bench.result_file import BenchmarkResult
    from zipmoe.store.packed_folder import PackedFolder


_SHARED_OPTIONS = {"rounds", "threads", "json_file", "markdown_file", "plot_file", "kernels"}
_KERNEL_OPTIONS = {"shapes", "tokens", "megabytes"}


def bench_command(
    context: typer.Context,
    folder: Annotated[Path | None, typer.Argument(metavar="[DST]", help="Packed folder", show_default=False)] = None,
    source: Annotated[
        Path | None, typer.Option(help="The original checkpoint, for Transformers and Accelerate")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="The same model for llama.cpp, in BF16 (made by its convert_hf_to_gguf.py)")
    ] = None,
    memory: Annotated[
        str,
        typer.Option(help="Limits, page cache included: shares of the model in BF16, amounts, 'fits' (all of it fits)"),
    ] = "25%,50%,75%,fits",
    contenders: Annotated[
        str, typer.Option(help="Of zipmoe, zipmoe-exact, transformers, accelerate, llama.cpp, deepspeed, airllm")
    ] = "zipmoe,transformers,accelerate,llama.cpp",
    prompts: Annotated[int, typer.Option(help="Prompts that are measured one by one [topics: one for each]")] = 3,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate after each prompt")] = 32,
    batch: Annotated[str, typer.Option(help="Batch sizes: 1 measures prompt by prompt")] = "1",
    topic: Annotated[
        str | None, typer.Option(help="Prompts of token ids topic + 64 * k, for models that are made with topics")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text with one prompt per line [default: random token ids]")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Times that everything is measured [default: 1; kernels: 7]")
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Python for a contender, e.g. llama.cpp=venv/bin/python; repeatable"),
    ] = None,
    read_ahead_kib: Annotated[
        str | None,
        typer.Option(help="Read-ahead settings of the disk to try for mapped contenders, e.g. 128,8192 (needs root)"),
    ] = None,
    accelerate_share: Annotated[
        str, typer.Option(help="Shares of the limit that Accelerate keeps weights in, to try")
    ] = "0.5,0.6,0.7,0.8",
    trial_tokens: Annotated[
        int,
        typer.Option(help="Tokens of the short runs that find each contender's best setting; 0: measure all settings"),
    ] = 8,
    slow_new_tokens: Annotated[
        int, typer.Option(help="Tokens to generate with deepspeed and airllm, after a single prompt")
    ] = 4,
    threads: Annotated[int | None, typer.Option(help="Threads of every contender [default: all cores]")] = None,
    seconds_per_run: Annotated[float, typer.Option(help="A run that takes longer is ended")] = 1800.0,
    work: Annotated[
        Path | None, typer.Option(help="Folder that contenders may offload to [default: beside DST]")
    ] = None,
    no_limit: Annotated[
        bool,
        typer.Option("--no-limit", help="Measure without limits where none can be set (zipmoe keeps to its budget)"),
    ] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Measure products with packed weights and decoding instead; without DST")
    ] = False,
    shapes: Annotated[
        str | None, typer.Option(help="Kernels: ROWSxCOLUMNS of the matrices [default: Qwen1.5-MoE's]")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Kernels: numbers of tokens [default: all that have products of their own]")
    ] = None,
    megabytes: Annotated[int, typer.Option(help="Kernels: BF16 weights that go by in turn")] = 420,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything raw to this file")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables to this file")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw TPOT by memory (needs matplotlib)")] = None,
) -> None:
    """Compare with Transformers, Accelerate and llama.cpp, in turn, each under the same memory limit."""
    from zipmoe.errors import InvalidArgumentError

    _check_options(context, kernels)
    _check_files(source, gguf, work, json_file, markdown_file, plot_file)
    if kernels:
        if folder is not None:
            raise InvalidArgumentError("--kernels measures no model: leave out DST, or --kernels")
        with ended_by_signals():
            bench_kernels(shapes, tokens, megabytes, rounds, threads, json_file, markdown_file, plot_file)
        return
    if folder is None:
        raise InvalidArgumentError("no packed folder was named", hint="zipmoe bench DST, or zipmoe bench --kernels")
    from zipmoe.bench.benchmark import BenchmarkPlan
    from zipmoe.bench.comparison_plot import check_plot
    from zipmoe.bench.contenders import Models, parse_contenders
    from zipmoe.bench.memory_levels import memory_levels
    from zipmoe.store.packed_folder import PackedFolder

    sizes = tuple(_numbers(batch, "--batch", int))
    if plot_file is not None:
        check_plot(plot_file)
    opened = PackedFolder.open(folder)
    plan = BenchmarkPlan(
        models=Models(opened.path, source, gguf),
        levels=memory_levels(memory, opened.manifest.source_bytes),
        prompts=_prompts(opened, prompts, prompt_tokens, max(sizes, default=1), topic, prompt_file),
        contenders=parse_contenders(contenders),
        new_tokens=new_tokens,
        batches=sizes,
        rounds=1 if rounds is None else rounds,
        read_aheads=tuple(_numbers(read_ahead_kib, "--read-ahead-kib", int)) if read_ahead_kib is not None else (),
        cpu_shares=tuple(_numbers(accelerate_share, "--accelerate-share", float)),
        seconds_per_run=seconds_per_run,
        work_folder=work,
        trial_tokens=trial_tokens,
        slow_new_tokens=slow_new_tokens,
        threads=len(os.sched_getaffinity(0)) if threads is None else threads,
    )
    with ended_by_signals():
        result = _measure(plan, opened, _interpreters(python or []), no_limit)
    _write(result, json_file, markdown_file, plot_file)


def _measure(
    plan: BenchmarkPlan, opened: PackedFolder, interpreters: dict[str, str], no_limit: bool
) -> BenchmarkResult:
    from zipmoe.bench.benchmark import Benchmark
    from zipmoe.bench.contenders import WorkerCommands
    from zipmoe.bench.machine_rates import RateProbe
    from zipmoe.bench.other_load import LoadBesideWorkers
    from zipmoe.bench.read_ahead import read_ahead_kib
    from zipmoe.bench.result_file import BenchmarkResult

    load = LoadBesideWorkers()
    with _group_parent(no_limit) as parent:
        benchmark = Benchmark(
            plan, parent, commands=WorkerCommands(interpreters), rate_probe=RateProbe(opened), tell=talk
        )
        measured: list[Measured] = benchmark.run()
    ahead = read_ahead_kib(opened.path)
    return BenchmarkResult(plan, tuple(measured), parent is not None, ahead, load.cores())


def _write(result: BenchmarkResult, json_file: Path | None, markdown_file: Path | None, plot_file: Path | None) -> None:
    from zipmoe.bench.comparison_plot import plot
    from zipmoe.bench.markdown_report import markdown
    from zipmoe.cli.bench_tables import print_comparison

    if json_file is not None:
        json_file.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    if markdown_file is not None:
        markdown_file.write_text(markdown(result), encoding="utf-8")
    if plot_file is not None:
        plot(result.rows, plot_file)
    print_comparison(result)


def _group_parent(no_limit: bool) -> Any:
    """A context manager: the parent of limited groups, or None if there shall or can be no limit."""
    from zipmoe.bench.control_group import find_parent

    if no_limit:
        return nullcontext(None)
    return find_parent()


def _prompts(
    opened: PackedFolder, single: int, tokens: int, largest: int, topic: str | None, prompt_file: Path | None
) -> PromptSet:
    from zipmoe.bench.prompts import file_prompts, random_prompts, topic_prompts
    from zipmoe.errors import InvalidArgumentError

    if topic is not None and prompt_file is not None:
        raise InvalidArgumentError("give either --topic or --prompt-file")
    if single < 1 or tokens < 1:
        raise InvalidArgumentError("--prompts and --prompt-tokens take positive numbers")
    if prompt_file is not None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(opened.path)
        except (OSError, ValueError, ImportError) as error:
            raise InvalidArgumentError(
                f"{str(opened.path)!r} has no usable tokenizer: {str(error).splitlines()[0]}",
                hint="leave out --prompt-file, or copy the tokenizer's files into the folder",
            ) from error
        return file_prompts(prompt_file, tokenizer, single, largest, tokens)
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(opened.path).get_text_config(decoder=True).vocab_size
    if topic is not None:
        return topic_prompts(list(_numbers(topic, "--topic", int)), largest, tokens, vocabulary)
    return random_prompts(single, largest, tokens, vocabulary)


def _interpreters(choices: list[str]) -> dict[str, str]:
    from zipmoe.bench.contenders import parse_contenders
    from zipmoe.errors import InvalidArgumentError

    found = {}
    for choice in choices:
        name, separator, path = choice.partition("=")
        if not separator or not path:
            raise InvalidArgumentError(
                f"--python {choice!r} is not NAME=PATH", hint="e.g. --python llama.cpp=venv/bin/python"
            )
        (contender,) = parse_contenders(name)
        found[contender.value] = path
    return found


def _numbers(text: str, option: str, kind: type[Any]) -> Iterator[Any]:
    from zipmoe.errors import InvalidArgumentError

    for part in text.split(","):
        try:
            yield kind(part)
        except ValueError:
            raise InvalidArgumentError(f"{option} {text!r} is not a list of numbers") from None


def _check_options(context: typer.Context, kernels: bool) -> None:
    """Refuse options that would change nothing: those of the comparison with ``--kernels``, and the other way round."""
    from zipmoe.errors import InvalidArgumentError

    ignored = [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name is not None
        and parameter.name not in _SHARED_OPTIONS
        and parameter.param_type_name == "option"
        and (parameter.name in _KERNEL_OPTIONS) != kernels
        and _is_given(context, parameter.name)
    ]
    if ignored:
        other = "of the comparison of engines, not of --kernels" if kernels else "of --kernels"
        raise InvalidArgumentError(
            f"{', '.join(ignored)}: {'these are options' if len(ignored) > 1 else 'this is an option'} {other}",
            hint=f"leave {'them' if len(ignored) > 1 else 'it'} out, or {'--kernels' if kernels else 'add --kernels'}",
        )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _check_files(source: Path | None, gguf: Path | None, work: Path | None, *outputs: Path | None) -> None:
    """Refuse before anything slow what could not be read or written after it."""
    from zipmoe.errors import InvalidArgumentError

    for path, there in ((source, source and source.is_dir()), (gguf, gguf and gguf.is_file())):
        if path is not None and not there:
            raise InvalidArgumentError(f"there is no {str(path)!r}")
    if work is not None and not work.is_dir():
        raise InvalidArgumentError(f"--work {str(work)!r} is no folder")
    for output in outputs:
        if output is not None and (output.is_dir() or not output.parent.is_dir()):
            raise InvalidArgumentError(f"{str(output)!r} cannot be written", hint="name a file in an existing folder")
