"""The child of a rehearsal: takes vllm's own flags through vLLM's own configuration, model classes and KV planner.

Runs under the stub driver, once stock and once with the overlay; `columns` starts it. It reads a list of requests from
the file that is its first argument and writes their answers to the second, after each of them, so that what was found
before a crash is kept. Lines on stderr that begin with PROGRESS are for the person who waits.
"""

import gc
import json
import logging
import os
import re
import sys
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from overlay.errors import OverlayError

PROGRESS = "rehearsal: "
FIRST_STAGE = "importing vLLM"  # of each question


@dataclass(frozen=True)
class Request:
    """What to rehearse. Sizes are bytes per GPU; where `kv_memory` is None it is what `memory` leaves."""

    flags: list[str]  # of `vllm serve`, the model among them
    capability: list[int]
    memory: int
    kv_memory: int | None
    allowance: int


class Rehearsal:
    """vLLM's boot up to where it would load weights: each stage adds to `fields`, a failed one ends the column."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.fields: dict[str, Any] = {"boots": False, "failure": None, "log": []}
        self.config: Any = None
        self.kv_cache_config: Any = None
        self.models: list[Any] = []
        self.stack = ExitStack()
        self.lines = _Lines(self.fields["log"])

    def run(self) -> dict[str, Any]:
        environ = dict(os.environ)  # vLLM's configuration writes into it what the next one would take for the user's
        with self.stack:
            for name, work in self.stages():
                sys.stderr.write(f"{PROGRESS}{name}\n")  # in one piece: vLLM's threads log beside it
                sys.stderr.flush()
                try:
                    work()
                except Exception as error:
                    traceback.print_exc()
                    self.fields["failure"] = {"stage": name, "error": _in_words(error)}
                    break
        os.environ.clear()
        os.environ.update(environ)
        self.fields["boots"] = self.fields["failure"] is None
        self.fields["patches"] = _patches()
        return self.fields

    def stages(self) -> list[tuple[str, Any]]:
        return [
            (FIRST_STAGE, self.start),
            ("vLLM's configuration", self.configure),
            ("the model, without weights", self.build),
            ("the KV cache plan", self.plan),
            ("CUDA graphs", self.graphs),
            ("the first batch", self.first_batch),
        ]

    def start(self) -> None:
        import vllm

        from overlay.rehearsal import device, driver

        self.listen()
        device.stand_in(driver.board(tuple(self.request.capability)), self.request.memory)
        self.fields["vllm"] = vllm.__version__

    def listen(self) -> None:
        """Keep the log lines that explain the column; vLLM's own set-up of logging removes other people's handlers."""
        for name in ("vllm", "overlay"):
            logger = logging.getLogger(name)
            if self.lines not in logger.handlers:
                logger.addHandler(self.lines)
                self.stack.callback(logger.removeHandler, self.lines)

    def configure(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
        from vllm.model_executor.models import registry
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from overlay.rehearsal import reading

        # vLLM looks at the model's class in a child, so as not to initialise CUDA here. There is none to initialise,
        # and this process needs the class anyway: 15 s saved.
        registry._run_in_subprocess = lambda function: function()
        parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
        parser.error = _refuse
        arguments = parser.parse_args(self.request.flags)
        validate_parsed_serve_args(arguments)
        self.config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
        self.listen()
        self.fields |= reading.configuration(self.config)

    def build(self) -> None:
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.platforms import current_platform

        from overlay.rehearsal import device, reading

        self.stack.enter_context(device.parallel_groups(self.config, rank=0))
        self.fields["selections"] = self.stack.enter_context(reading.recorded_selections())
        speculative = self.config.speculative_config
        with device.model_under_construction(self.config.model_config.dtype) as pretended:
            before = pretended.device_bytes(device.live_tensors())
            self.models.append(initialize_model(self.config))
            if speculative is not None and speculative.draft_model_config is not None:
                self.models.append(self._draft(speculative.draft_model_config))
        current_platform.update_block_size_for_backend(self.config)
        self.fields |= reading.attention(self.config, self.fields["selections"])
        self.fields |= reading.weights(self.models, pretended, before)
        self.fields |= reading.experts(self.models)
        self.fields["indexer_topk"] = reading.indexer_topk(self.config)

    def _draft(self, model_config: Any) -> Any:
        """The draft model beside its target, its attention layers marked as the speculator marks them."""
        from vllm.model_executor.model_loader.utils import initialize_model

        from overlay.rehearsal import reading

        of_target = set(reading.attention_layers(self.config))
        model = initialize_model(self.config, model_config=model_config)
        for name, layer in reading.attention_layers(self.config).items():
            layer.is_draft_layer = name not in of_target
        return model

    def plan(self) -> None:
        """EngineCore's own method, with an executor that has this model on every rank and a given memory."""
        from overlay.rehearsal import reading

        # The core's questions to its workers are answered by this process here, which is not worth a line.
        logging.getLogger("overlay").removeHandler(self.lines)
        # With memory for 2^60 bytes, memory // blocks is a block's size to the byte, whatever the release's layout.
        endless = 1 << 60
        per_block = endless // self._planned(endless).num_blocks
        tokens = self.fields["block_size"] * self.config.parallel_config.decode_context_parallel_size
        self.fields |= {"bytes_per_block": per_block, "bytes_per_token": round(per_block / tokens, 1)}
        memory = self.request.kv_memory or self.config.cache_config.kv_cache_memory_bytes
        if memory is None:
            budget = reading.budget(self.config, self.fields, self.request.memory, self.request.allowance)
            self.fields["budget"] = budget
            memory = budget["kv_cache"]
            if memory <= 0:
                raise OverlayError("no memory is left for the KV cache")
        self.fields["kv_memory"] = memory
        self.kv_cache_config = self._planned(memory)
        self.fields |= reading.kv_plan(self.config, self.kv_cache_config)

    def _planned(self, memory: int) -> Any:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
        from vllm.v1.worker.worker_base import WorkerBase

        worker = SimpleNamespace(vllm_config=self.config)
        ranks = self.config.parallel_config.world_size
        executor = SimpleNamespace(
            get_kv_cache_specs=lambda: [get_kv_cache_spec(self.config)] * ranks,
            get_supported_kv_cache_layouts=lambda: [WorkerBase.get_supported_kv_cache_layouts(worker)] * ranks,
            determine_available_memory=lambda: [memory] * ranks,
            set_kv_cache_layout=lambda *layout: None,  # the one configuration of this process has it already
            initialize_from_config=lambda configs: None,
            compile_or_warm_up_model=lambda: None,
            collective_rpc=lambda method, *rest, **options: [method(worker) if callable(method) else None] * ranks,
        )
        core = EngineCore.__new__(EngineCore)
        core.model_executor = executor
        return core._initialize_kv_caches(self.config)

    def graphs(self) -> None:
        from overlay.rehearsal import reading

        self.fields |= reading.graphs(self.config, self.models[0], self.kv_cache_config)

    def first_batch(self) -> None:
        """Nothing runs here; but what is installed may tell that the selected backend cannot run this model."""
        import vllm

        from overlay.rehearsal import reading

        root = Path(vllm.__file__).parent
        if defect := reading.known_defect(self.config, self.fields["attention_backend"], root):
            raise OverlayError(defect)


class _Lines(logging.Handler):
    """Keeps what explains the column: the overlay's own lines and vLLM's warnings, each once."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.name.partition(".")[0] == "overlay"
        line = record.getMessage().partition("\n")[0]
        if "cudaErrorInsufficientDriver" in line:  # the stub driver's doing, not the rehearsed machine's
            return
        if (ours or record.levelno >= logging.WARNING) and line not in self.lines:
            self.lines.append(line)


def main(requests_file: str, answers_file: str) -> None:
    """Answer every request of the file, in its order and in this one process."""
    answers = []
    for request in json.loads(Path(requests_file).read_text()):
        answers.append(Rehearsal(Request(**request)).run())
        Path(answers_file).write_text(json.dumps(answers))
        gc.collect()  # a model refers to itself: without this it would count among the next one's buffers


def _refuse(message: str) -> NoReturn:
    raise OverlayError(f"vllm serve: {message}")


def _in_words(error: BaseException) -> str:
    """The error as one paragraph, without the frame that pydantic puts around it; what we raise names itself."""
    text = " ".join(line for line in str(error).splitlines() if "errors.pydantic.dev" not in line)
    said = re.sub(r" \[type=\w+, input_value=.*\]$", "", " ".join(text.split()))
    return said if isinstance(error, OverlayError) else f"{type(error).__name__}: {said}"


def _patches() -> list[dict[str, str]]:
    from overlay import startup

    overlay = startup.current()
    if overlay is None:
        return []
    return [{"id": entry.patch.id, "state": str(entry.state), "reason": entry.reason} for entry in overlay.entries]


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written. Taking down what vLLM has imported costs a third of the whole rehearsal.
    os._exit(0)
