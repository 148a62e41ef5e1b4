"""Worker extensions for tests: one that says what the weights are, and one that fails when it is told to; and a route
that listens to one engine.
"""

import gc
import hashlib
import os
import signal

import torch

from deltawire.engines.vllm import copies, route, worker
from deltawire.engines.vllm.worker import WorkerExtension

# vLLM's own kernels use a CPU's AMX without asking for it. Otherwise torch's first product does, which a server with
# packed weights has none of.
torch.cpu._init_amx()


class CheckedExtension(WorkerExtension):
    """Deltawire's, and what `/weight_checker` does, which vLLM has from 0.32 on."""

    def checksums(self):
        found = {}
        for name, value in self.get_model().named_parameters():
            bits = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
            found[f"dp0:pp0:pcp0:tp{self.rank}:{name}"] = hashlib.sha256(bits).hexdigest()
        return found

    def num_collectable(self):
        """How many objects Python looks through when it collects garbage."""
        return {"objects": len(gc.get_objects())}

    def stammer(self):
        """Answer the next write with nothing, and do nothing."""
        self.stammers = True
        return {}

    def deltawire(self, name, arguments):
        if name == "write" and getattr(self, "stammers", False):
            self.stammers = False
            return None
        return super().deltawire(name, arguments)

    def zero(self):
        with torch.no_grad():
            for value in self.get_model().parameters():
                value.zero_()
        return {}


class FaultyExtension(CheckedExtension):
    def fail(self, how):
        """Let the next writes of a worker fail, the next ones that take something back, or what it stages next."""
        live = self.weight_transfer_engine.live
        if self.weight_transfer_engine.index != how["rank"]:
            return {}
        if how.get("stages"):

            def stage_file(path):
                del live.stage_file
                raise MemoryError("no room to stage it")

            live.stage_file = stage_file
            return {}
        left = {False: how.get("writes", 0), True: how.get("undos", 0)}
        original = type(live).write.__get__(live)

        def write(token, *, undo=False):
            if left[undo]:
                left[undo] -= 1
                live.state = None
                raise MemoryError("no room for that")
            original(token, undo=undo)

        live.write = write
        return {}

    def plant(self, name):
        """Let a layer compute from a copy of its weight, which nothing shows, from now on."""
        module = self.get_model().get_submodule(name)
        original, copy = module.forward, module.weight.data.clone()

        def forward(*given, **named):
            own, module.weight.data = module.weight.data, copy
            try:
                return original(*given, **named)
            finally:
                module.weight.data = own

        module.forward = forward
        return {}

    def absorb(self):
        """Let latent attention have copies where it has views of `kv_b_proj`, as vLLM makes on other machines."""
        for module in self.get_model().modules():
            for name in ("W_UV", "W_UK_T"):
                if name in module._parameters:
                    copy = getattr(module, name).data.clone()
                    module.register_parameter(name, torch.nn.Parameter(copy, requires_grad=False))
        return {}

    def mumble(self):
        """Answer the next command with what cannot be sent."""
        engine = self.weight_transfer_engine

        def command(name, arguments):
            del engine.command
            return {name}

        engine.command = command
        return {}

    def forget_sinks(self):
        """Do nothing about sinks that are copied, from now on."""
        copies._sinks = lambda model: iter(())
        return {}

    def forget_coverage(self):
        """Do not ask whether a run has all that the model has, from now on."""
        worker.check_covered = lambda *given: None
        return {}

    def spoil(self, rank, name):
        """Turn the sign of one element of a parameter on one rank, as nobody should; again, and it is as it was."""
        if self.rank == rank:
            self.get_model().get_parameter(name).data.view(-1)[0] *= -1
        return {}

    def spoil_code(self, name):
        """Turn a bit of a quantized parameter, as nobody should."""
        self.get_model().get_parameter(name).data.view(torch.uint8)[0, 0] ^= 1
        return {}

    def die_in_decode(self):
        """Let the process be killed when it has decoded the first entry of the next delta."""
        memory = self.weight_transfer_engine.live._memory
        decode = memory.decode

        def dying(entries):
            decode(entries[:1])
            os.kill(os.getpid(), signal.SIGKILL)

        memory.decode = dying
        return {}


class FirstEngine(route.Route):
    """Has the answer of the first of two engines for both, as vLLM's own calls give it, and asks both for the same."""

    def __init__(self, app):
        super().__init__(app)
        ask = route._ask

        async def ask_first(client, name, arguments):
            both = {key: [*arguments[key]] * 2 for key in ("paths", "numbers") if key in arguments}
            if "answers" in arguments:
                both["answers"] = [*arguments["answers"], f"{arguments['answers'][0]}-lost"]
            return (await ask(client, name, {**arguments, **both}))[:1]

        route._ask = ask_first
