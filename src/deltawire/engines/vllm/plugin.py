"""What vLLM calls at the start of each of its processes, by the entry point `vllm.general_plugins`."""

import os

BACKEND = "deltawire"


def register() -> None:
    """Make the weight transfer backend `deltawire` known; on a CPU, keep weights unpacked where that is asked for."""
    from vllm import __version__

    from deltawire.engines.vllm import cpu
    from deltawire.engines.vllm.versions import is_too_old

    if is_too_old(__version__):
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "deltawire.engines.vllm.worker", "DeltawireEngine")
    if os.environ.get(cpu.SWITCH, "").lower() in ("1", "true", "yes"):
        cpu.keep_unpacked()
