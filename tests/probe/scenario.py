"""Child process: the probes of attention and indexer on CPU tensors under the fake driver. Prints one JSON object.

The overlay's backend serves vLLM's real layer over the fp64 reference of its kernel (`tests.attention.standin`): what
is tried is the layer, its cache, its metadata and the judgement. vLLM's own backends cannot run here.
"""

import json
from dataclasses import asdict
from unittest import mock

from tests.attention import standin


def main() -> None:
    import vllm
    import vllm.platforms.cuda  # the stand-ins go where it is imported

    from overlay.probe import attention, indexer

    def measured(kernel: type) -> list[dict]:
        with standin.without_gpu(), mock.patch.object(standin, "Kernel", kernel):
            return [asdict(row) for row in attention.measure(8, "cpu", (1, 5))]

    class Louder(standin.Kernel):
        def __call__(self, *args: object, **kwargs: object) -> None:
            super().__call__(*args, **kwargs)
            args[4].mul_(1.05)

    class Raising(standin.Kernel):
        def __call__(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("no kernel image is available")

    seen = {
        "version": vllm.__version__,
        "offered": [asdict(row) for row in attention.offered(8)],
        "measured": measured(standin.Kernel),
        "louder": measured(Louder),
        "raising": measured(Raising),
    }
    with standin.without_gpu():
        seen["indexer"] = [asdict(row) for row in indexer.measure("cpu", ("torch", "deep_select"))]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
