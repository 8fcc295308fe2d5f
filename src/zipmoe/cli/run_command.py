"""``zipmoe run``."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zipmoe.cli.progress import talk

if TYPE_CHECKING:
    import torch

    from zipmoe.engine.statistics import RunReport

_PLANNED, _SINGLE_POOL = "plan", "none"
_LOWEST_TEMPERATURE = 1e-6
"""Logits divided by less leave the range of FP32."""


def run_command(
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Packed folder")],
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Budget for everything the process keeps: 4GB (1000-based), 4GiB or 4G (1024-based) "
            "[default: what the machine allows]",
        ),
    ] = None,
    pools: Annotated[
        str | None,
        typer.Option(
            help="Experts per sparse layer kept decoded (F), compressed (C), with SM-chunks only (S), with E-chunks "
            "only (E), e.g. F=0,C=12,S=8,E=0; none: one pool of compressed experts, as large as the budget allows "
            "[default: what zipmoe plan chooses, or none without a profile]"
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded routing to plan the pools with [default: what zipmoe plan kept]")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Which experts make room: zipmoe, lru, lfu, lfuda, fifo or marking; auto: whichever is found best "
            "while the model runs [default: auto]"
        ),
    ] = None,
    half_life: Annotated[
        float | None, typer.Option(help="Steps after which an activation counts half; makes zipmoe the policy")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; '-' reads it from standard input")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(help="Token ids instead of text, separated by commas or blanks")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most")] = 128,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Logits bit for bit equal to plain Transformers on this machine; without it, products "
            "read packed weights where the codec has kernels for that, and round differently",
        ),
    ] = False,
    combine: Annotated[
        str | None,
        typer.Option(help="Order in which expert outputs are summed: grouped_mm or eager [default: the family's own]"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy")] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the smallest set of tokens with this probability; needs a temperature")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling; needs a temperature [default: 0]")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the end-of-text token")] = False,
    io_mode: Annotated[
        str,
        typer.Option("--io", help="Reads: auto (past the page cache where possible) or buffered (through it)"),
    ] = "auto",
    record_trace: Annotated[
        Path | None, typer.Option(help="Write which experts every layer activates to this new file (plan, simulate)")
    ] = None,
    io_backend: Annotated[
        str,
        typer.Option(
            help="What reads from disk: threads, uring (io_uring) or auto, which is what measures best: threads"
        ),
    ] = "auto",
    io_threads: Annotated[
        int | None,
        typer.Option(help="Threads that read [default: what zipmoe profile found best for this disk, else 4]"),
    ] = None,
    io_depth: Annotated[
        int | None,
        typer.Option(help="Blocks that io_uring reads at a time [default: what zipmoe profile found best, else 8]"),
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option(help="Keep all threads on these CPUs, e.g. 0-3,6 [default: those that the process may use]"),
    ] = None,
    look_ahead: Annotated[
        bool | None,
        typer.Option(
            "--look-ahead/--no-look-ahead",
            help="Read in idle disk time what the next layer, in steps and prompts, or the likeliest next token will "
            "probably need; needs --pools none [default: where it is possible]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text")] = False,
) -> None:
    """Continue a prompt with a packed model under a memory budget (text on stdout, numbers on stderr)."""
    from zipmoe.engine.cache_policy import checked_pair
    from zipmoe.engine.cpu_affinity import check_cpus, parse_cpus
    from zipmoe.engine.io_backend import choose_reads

    _check_options(memory, prompt, prompt_ids, chat, max_new_tokens, temperature, top_p, seed, combine)
    if io_mode not in ("auto", "buffered"):
        from zipmoe.errors import InvalidArgumentError

        raise InvalidArgumentError(f"--io {io_mode!r} is unknown", hint="choose auto or buffered")
    choose_reads(io_backend, io_threads, io_depth)
    if cpus is not None:
        check_cpus(parse_cpus(cpus))
    if record_trace is not None:
        _check_new_file(record_trace)
    ids = _parse_ids(prompt_ids) if prompt_ids is not None else None
    _check_pools(pools, trace)
    checked_pair(policy, half_life)

    from zipmoe.store.packed_folder import PackedFolder

    opened = PackedFolder.open(folder)  # names what is wrong before Transformers is imported and the tokenizer read
    import torch
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from transformers import logging as transformers_logging

    import zipmoe
    from zipmoe.cli.token_stream import TokenStream
    from zipmoe.hf.trace_recording import record_trace as record_routing

    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    tokenizer = _tokenizer(AutoTokenizer, folder) if prompt is not None or not as_json else None
    if ids is not None:
        _check_ids(ids, AutoConfig.from_pretrained(folder).get_text_config(decoder=True).vocab_size)
    inputs = torch.tensor([ids]) if ids is not None else _encode(tokenizer, _read_prompt(prompt), chat)
    settings = zipmoe.ZipMoEConfig(
        memory=memory,
        mode="exact" if exact else None,
        context_tokens=inputs.shape[1] + max_new_tokens,
        io_mode=io_mode,
        io_threads=io_threads,
        io_depth=io_depth,
        io_backend=io_backend,
        cpus=cpus,
        pools=_PLANNED if pools is None else pools,
        trace=trace,
        policy=policy,
        half_life_steps=half_life,
        look_ahead=look_ahead,
    )
    model = zipmoe.load(opened, experts_implementation=combine, quantization_config=settings)
    mode_line = model.zipmoe_mode_line()
    talk(mode_line)
    options = _generation_options(model, GenerationConfig, max_new_tokens, temperature, top_p, ignore_eos)
    torch.manual_seed(seed or 0)
    stream = TokenStream(tokenizer, model.zipmoe_engine.statistics, sys.stdout if not as_json else None)
    with record_routing(model, record_trace) if record_trace is not None else nullcontext():
        new_ids, report = _generate(model, inputs, options, stream)
    if as_json:
        text = tokenizer.decode(new_ids, skip_special_tokens=True) if tokenizer is not None else None
        typer.echo(
            json.dumps(
                {
                    "text": text,
                    "tokens": new_ids,
                    "prompt_tokens": inputs.shape[1],
                    "mode": mode_line,
                    "statistics": report.as_dict(),
                }
            )
        )
    talk(report.line())
    model.zipmoe_engine.close()


def _check_options(
    memory: str | None,
    prompt: str | None,
    prompt_ids: str | None,
    chat: bool,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    combine: str | None,
) -> None:
    """Refuse what can be refused before anything slow is imported."""
    from zipmoe.engine.byte_quantity import parse_bytes
    from zipmoe.errors import InvalidArgumentError

    if (prompt is None) == (prompt_ids is None):
        raise InvalidArgumentError(
            "give either --prompt or --prompt-ids", hint='for example: --prompt "Once upon a time"'
        )
    if max_new_tokens < 1:
        raise InvalidArgumentError(f"--max-new-tokens {max_new_tokens} is not a positive number")
    if not (temperature == 0 or _LOWEST_TEMPERATURE <= temperature < math.inf) or not 0 < top_p <= 1:
        raise InvalidArgumentError(
            f"--temperature {temperature} with --top-p {top_p} is out of range",
            hint=f"temperature is 0 or at least {_LOWEST_TEMPERATURE}, top-p above 0 and at most 1",
        )
    if temperature == 0 and (top_p != 1 or seed is not None):
        raise InvalidArgumentError(
            "--top-p and --seed concern sampling, but temperature 0 is greedy", hint="add --temperature 0.8, say"
        )
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise InvalidArgumentError(f"--seed {seed} does not fit into 64 bits")
    if combine not in (None, "grouped_mm", "eager"):
        raise InvalidArgumentError(f"--combine {combine!r} is unknown", hint="choose grouped_mm or eager")
    if chat and prompt_ids is not None:
        raise InvalidArgumentError("--chat needs --prompt, not --prompt-ids")
    if memory is not None:
        parse_bytes(memory)


def _check_pools(pools: str | None, trace: Path | None) -> None:
    from zipmoe.engine.pool_slots import PoolSlots
    from zipmoe.errors import InvalidArgumentError

    if pools is not None and pools not in (_PLANNED, _SINGLE_POOL):
        PoolSlots.parse(pools)
    if trace is not None and pools not in (None, _PLANNED):
        raise InvalidArgumentError("--trace is for planning the pools", hint="leave out --pools, or --trace")


def _check_new_file(path: Path) -> None:
    from zipmoe.errors import InvalidArgumentError

    if path.exists() or not path.parent.is_dir():
        why = "exists already" if path.exists() else "lies in no folder"
        raise InvalidArgumentError(f"--record-trace {str(path)!r} {why}", hint="name a new file")


def _generate(model: Any, inputs: torch.Tensor, options: Any, stream: Any) -> tuple[list[int], RunReport]:
    """The new token ids of a prompt (int64 [1, tokens]), and what the run cost."""
    import torch

    statistics = model.zipmoe_engine.statistics
    statistics.start_run()
    with torch.inference_mode():
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=options, streamer=stream
        )
    report = statistics.report()
    new_ids = output[0, 1:] if model.config.is_encoder_decoder else output[0, inputs.shape[1] :]
    return new_ids.tolist(), report


def _parse_ids(text: str) -> list[int]:
    from zipmoe.errors import InvalidArgumentError

    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidArgumentError(
            f"--prompt-ids {text[:40]!r} is not a list of numbers", hint="for example: --prompt-ids 12,7,300"
        ) from None
    if not ids:
        raise InvalidArgumentError("--prompt-ids is empty")
    if not all(-(1 << 63) <= number < 1 << 63 for number in ids):
        raise InvalidArgumentError("--prompt-ids holds ids outside of every vocabulary")
    return ids


def _check_ids(ids: list[int], vocabulary: int) -> None:
    from zipmoe.errors import InvalidArgumentError

    if min(ids) < 0 or max(ids) >= vocabulary:
        raise InvalidArgumentError(f"--prompt-ids holds ids outside of the vocabulary (0 to {vocabulary - 1})")


def _read_prompt(prompt: str | None) -> str:
    from zipmoe.errors import InvalidArgumentError

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        (text or "").encode()  # where undecodable bytes were let through, as in arguments
    except UnicodeError as error:
        raise InvalidArgumentError(
            "the prompt is not valid UTF-8", hint="convert it, for example with iconv -t UTF-8"
        ) from error
    if not text:
        raise InvalidArgumentError("the prompt is empty")
    return text


def _tokenizer(auto_tokenizer: Any, folder: Path) -> Any:
    from zipmoe.errors import InvalidArgumentError

    try:
        return auto_tokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        raise InvalidArgumentError(
            f"{str(folder)!r} has no usable tokenizer: {str(error).splitlines()[0]}",
            hint="use --prompt-ids with --json, or copy the tokenizer's files into the folder",
        ) from error


def _encode(tokenizer: Any, text: str, chat: bool) -> torch.Tensor:
    from zipmoe.errors import InvalidArgumentError

    if not chat:
        encoded = tokenizer(text, return_tensors="pt")["input_ids"]
    elif not tokenizer.chat_template:
        raise InvalidArgumentError("this model has no chat template", hint="leave out --chat")
    else:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    if encoded.shape[1] == 0:
        raise InvalidArgumentError("the prompt has no tokens")
    return encoded  # type: ignore[no-any-return]


def _generation_options(
    model: Any, generation_config: Any, max_new_tokens: int, temperature: float, top_p: float, ignore_eos: bool
) -> Any:
    own = model.generation_config
    options = generation_config(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=None if ignore_eos else own.eos_token_id,
        bos_token_id=own.bos_token_id,
        pad_token_id=_pad_token(own),
        decoder_start_token_id=own.decoder_start_token_id,
    )
    if ignore_eos:
        own.eos_token_id = None  # generate() takes what the options leave open from the model's own
    if temperature > 0:
        options.temperature, options.top_p, options.top_k = temperature, top_p, 0
    return options


def _pad_token(own: Any) -> int:
    if own.pad_token_id is not None:
        return int(own.pad_token_id)
    eos = own.eos_token_id
    return int((eos[0] if isinstance(eos, list) else eos) or 0)
