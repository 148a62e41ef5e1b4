"""A loopback server that keeps to SGLang's contract for weight updates, as read from the sources of 0.5.17 to 0.5.23.

SGLang itself needs a CUDA machine. What is here answers at the same endpoints, with the same rules, over a small model
that is fused and sliced over ranks as SGLang's are. Each rule says where SGLang has it. Where SGLang would end (an
exception in its scheduler), this server ends too, and `ended` says why.

`release` says which SGLang it is. Those before 0.5.21 have no sessions of updates, do not flush their cache while
requests wait, and end where a flush after an update is refused.
"""

import asyncio
import importlib
import io
import pickle
import threading
import time
from base64 import b64decode
from hashlib import sha256
from pathlib import Path

import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from deltawire.engines.sglang.ranks import LOADER
from support.servers import free_ports

VOCAB, HIDDEN, HEADS, INNER = 48, 32, 16, 64
PROMPT = [3, 1, 4, 1, 5]
PARTS = {"q": 2 * HEADS, "k": HEADS, "v": HEADS}


class Trainer(torch.nn.Module):
    """The model as a trainer has it, and a checkpoint names it."""

    def __init__(self, seed=0):
        super().__init__()
        shapes = {
            "embed": (VOCAB, HIDDEN), "norm": (HIDDEN,), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN),
            "down": (HIDDEN, INNER), **{part: (rows, HIDDEN) for part, rows in PARTS.items()},
        }  # fmt: skip
        self.random = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=self.random) * 0.2
            setattr(self, name, torch.nn.Parameter(values.to(torch.bfloat16)))

    def step(self, density=0.02):
        with torch.no_grad():
            for parameter in self.parameters():
                chosen = torch.rand(parameter.shape, generator=self.random) < density
                chosen.view(-1)[0] = True
                parameter[chosen] *= 1.02


class Served(torch.nn.Module):
    """One rank of it: q, k, v fused and gate, up fused, sliced over ranks by rows, `down` by columns, the embedding by
    rows that are padded, as SGLang's linear and vocabulary layers do.
    """

    def __init__(self, rank, ranks):
        super().__init__()
        self.rank, self.ranks = rank, ranks

        def empty(*shape):
            return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)

        self.embed = empty(VOCAB // ranks + 4, HIDDEN)
        self.qkv = empty(sum(PARTS.values()) // ranks, HIDDEN)
        self.gate_up = empty(2 * INNER // ranks, HIDDEN)
        self.down = empty(HIDDEN, INNER // ranks)
        self.norm = empty(HIDDEN)
        # Computed from a weight when it was loaded, as SGLang's MLA models do with theirs in post_load_weights.
        self.register_buffer("doubled", torch.zeros(HIDDEN), persistent=False)

    def tensors(self):
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def load_weights(self, weights):
        for name, value in weights:
            self.load_one(name, value)
        self.post_load_weights()

    def load_one(self, name, value):
        if name == "norm":
            self.norm.copy_(value)
        elif name == "embed":
            rows = VOCAB // self.ranks
            self.embed[:rows].copy_(value.narrow(0, self.rank * rows, rows))
            self.embed[rows:].fill_(0)
        elif name == "down":
            columns = INNER // self.ranks
            self.down.copy_(value.narrow(1, self.rank * columns, columns))
        else:
            fused, parts = (self.gate_up, {"gate": INNER, "up": INNER}) if name in ("gate", "up") else (self.qkv, PARTS)
            start = 0
            for part, rows in parts.items():
                rows //= self.ranks
                if part == name:
                    fused.narrow(0, start, rows).copy_(value.narrow(0, self.rank * rows, rows))
                start += rows

    def post_load_weights(self):
        self.doubled.copy_(2 * self.norm.float())

    def context(self, token):
        """What is computed once for a token, and kept for it."""
        rows = VOCAB // self.ranks
        own = token - self.rank * rows
        state = self.embed[own].float() if 0 <= own < rows else torch.zeros(HIDDEN)
        return state + (self.qkv.float().sum(0) + self.doubled * self.norm.float())

    def output(self, state):
        gate, up = (self.gate_up.float() @ state).chunk(2)
        return self.down.float() @ (torch.sigmoid(gate) * up)


class Scaling(Served):
    """Loads one weight otherwise than by copying it."""

    def load_one(self, name, value):
        super().load_one(name, value * 2 if name == "down" else value)


# srt/utils: what MultiprocessingSerializer.deserialize lets through, as far as tensors need it.
ALLOWED = ("builtins.", "collections.", "copyreg.", "functools.", "torch.", "multiprocessing.reduction.")


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if not (module + ".").startswith(ALLOWED) or name in ("eval", "exec", "compile"):
            raise RuntimeError(f"{module}.{name} may not be loaded")
        return super().find_class(module, name)


class Ended(Exception):
    """What SGLang's scheduler does not survive."""


class Double:
    """The server, in a thread. `restart` makes a new one at the same address, from the checkpoint it began with."""

    def __init__(
        self, checkpoint, *, ranks=1, loaders=(LOADER,), model=Served, version="default", api_key=None,
        release="0.5.23", keeps_prefixes=True, port=None,
    ):  # fmt: skip
        self.release, self.keeps_prefixes = release, keeps_prefixes
        self.is_old = tuple(map(int, release.split("."))) < (0, 5, 21)
        self.checkpoint, self.num_ranks, self.loaders, self.model = Path(checkpoint), ranks, list(loaders), model
        self.first_version, self.api_key = version, api_key
        (self.port,) = (port,) if port else free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.refuses_flush = False
        self.calls = []
        self.before = lambda path: None
        self.start()

    def start(self):
        self.models = [self.model(rank, self.num_ranks) for rank in range(self.num_ranks)]
        self.load(self.checkpoint)
        self.version, self.ended, self.session = self.first_version, None, False
        self.paused = None
        self.running, self.cache = [], {}
        routes = [
            Route(path, self.route(path, method), methods=[verb]) for (verb, path), method in self.routes().items()
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=self.port, log_level="critical", ws="none")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def stop(self):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()
        for model in self.models:
            # The system lets go of a process's locks when that ends.
            worker = vars(model).pop("_deltawire_worker", None)
            if worker is not None:
                worker.close()

    def restart(self):
        self.stop()
        self.start()

    def load(self, folder):
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no weights in {folder}")
        for model in self.models:
            for file in files:
                model.load_weights(load_file(file).items())

    def routes(self):
        return {
            ("GET", "/model_info"): self.model_info,
            ("GET", "/server_info"): self.server_info,
            ("POST", "/generate"): self.generate,
            ("POST", "/pause_generation"): self.pause,
            ("POST", "/continue_generation"): self.resume,
            ("POST", "/flush_cache"): self.flush,
            **({} if self.is_old else {
                ("POST", "/begin_weight_update"): self.begin,
                ("POST", "/end_weight_update"): self.end,
            }),
            ("POST", "/update_weights_from_tensor"): self.update_from_tensor,
            ("POST", "/update_weights_from_disk"): self.update_from_disk,
            ("POST", "/update_weight_version"): self.update_version,
            ("POST", "/weights_checker"): self.check_weights,
        }  # fmt: skip

    def route(self, path, method):
        async def answer(request):
            if self.api_key is not None and request.headers.get("authorization") != f"Bearer {self.api_key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            body = await request.json() if request.method == "POST" else {}
            self.calls.append(path)
            self.before(path)
            try:
                return await method(body)
            except Ended as error:
                self.ended = str(error)
                self.server.should_exit = self.server.force_exit = True
                return JSONResponse({"error": "the scheduler has died"}, 500)

        return answer

    # entrypoints/http_server.py: failures are 400 with success false.
    def result(self, success=True, message="Success", **more):
        return JSONResponse({"success": success, "message": message, **more}, 200 if success else 400)

    async def model_info(self, _):
        return JSONResponse({"model_path": str(self.checkpoint), "weight_version": self.version})

    # entrypoints/http_server.py: the server's arguments, flat.
    async def server_info(self, _):
        return JSONResponse(
            {
                "tp_size": self.num_ranks,
                "pp_size": 1,
                "dp_size": 1,
                "custom_weight_loader": self.loaders,
                "enable_eplb": False,
                "disable_radix_cache": not self.keeps_prefixes,
                "version": self.release,
            }
        )

    # managers/tokenizer_manager.py: new requests wait while paused. managers/scheduler.py: what is computed for a token
    # is kept, also for other requests that begin the same way, until the cache is flushed.
    async def generate(self, body):
        tokens, request = list(body["input_ids"]), {"kept": {}, "aborted": False}
        while self.paused:
            await asyncio.sleep(0.001)
        self.running.append(request)
        outputs = []
        try:
            for _ in range(body["max_new_tokens"]):
                await asyncio.sleep(0.001)
                while self.paused and not request["aborted"]:
                    await asyncio.sleep(0.001)
                if request["aborted"]:
                    break
                output = self.compute(tokens, request["kept"])
                outputs.append(float(output.sum()))
                tokens.append(int(output.argmax()))
        finally:
            # By identity: their tensors cannot be compared.
            self.running = [each for each in self.running if each is not request]
        reason = "abort" if request["aborted"] else "length"
        meta = {"weight_version": self.version, "finish_reason": {"type": reason}}
        return JSONResponse({"outputs": outputs, "meta_info": meta})

    def compute(self, tokens, kept):
        for place in range(len(tokens)):
            if place not in kept:
                key = tuple(tokens[: place + 1])
                found = self.cache.get(key)
                if found is None:
                    found = sum(model.context(tokens[place]) for model in self.models)
                if self.keeps_prefixes:
                    self.cache[key] = found
                kept[place] = found
        state = sum(kept.values()) / len(kept)
        return sum(model.output(state) for model in self.models)

    # managers/scheduler.py pause_generation: in_place leaves requests as they are; retract puts them back into the
    # queue without what was computed for them. managers/tokenizer_manager.py: abort ends them and waits for that.
    async def pause(self, body):
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return JSONResponse({"error": mode}, 422)
        self.paused = "retract" if self.paused == "retract" else mode
        for request in self.running:
            if mode == "retract":
                request["kept"].clear()
            elif mode == "abort":
                request["aborted"] = True
        while mode == "abort" and self.running:
            await asyncio.sleep(0.001)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _):
        self.paused = None
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    def flushed(self):
        """managers/scheduler.py flush_cache, is_fully_idle: only where nothing runs. Requests that were retracted do
        not run, but wait, which counts as well before 0.5.21.
        """
        if self.refuses_flush or (self.running and (self.is_old or self.paused != "retract")):
            return False
        self.cache.clear()
        return True

    # entrypoints/http_server.py: plain text, 400 where it was refused.
    async def flush(self, _):
        return PlainTextResponse("Cache flushed.") if self.flushed() else PlainTextResponse("refused", 400)

    # managers/tokenizer_control_mixin.py: while the server is paused updates go through at once; otherwise they wait
    # for all requests to end.
    async def writing(self):
        while not self.paused and self.running:
            await asyncio.sleep(0.001)

    # managers/scheduler_components/weight_updater.py: one session at a time, and updates from tensors only in one.
    async def begin(self, body):
        await self.writing()
        if self.session:
            return self.result(False, "a weight-update session is already open")
        if body.get("selector", "all") not in ("target", "draft", "all"):
            raise Ended("unknown selector")
        self.session = True
        return self.result()

    async def end(self, _):
        await self.writing()
        if not self.session:
            return self.result(False, "no weight-update session is open")
        self.session = False
        return self.result()

    async def update_from_tensor(self, body):
        await self.writing()
        if not self.session and not self.is_old:
            return self.result(False, "must run between begin_weight_update and end_weight_update")
        if len(body["serialized_named_tensors"]) != self.num_ranks:
            raise Ended("one payload for each tensor-parallel rank")
        for rank, model in enumerate(self.models):
            self.update_rank(model, body["serialized_named_tensors"][rank], body.get("load_format"))
        return self.updated(body)

    # model_executor/model_runner_components/weight_updater.py: only loaders that the server was started with; whatever
    # is raised there nobody catches.
    def update_rank(self, model, payload, load_format):
        try:
            tensors = Unpickler(io.BytesIO(b64decode(payload, validate=True))).load()
            tensors = [(name, tensor.to("cpu")) for name, tensor in tensors]
            if load_format is None:
                model.load_weights(tensors)
            elif load_format in self.loaders:
                module, _, name = load_format.rpartition(".")
                getattr(importlib.import_module(module), name)(model, tensors)
            else:
                raise NotImplementedError(f"Unknown load_format={load_format}")
        except Exception as error:
            raise Ended(f"{type(error).__name__}: {error}") from error

    # scheduler_components/weight_updater.py: a flush after the weights have changed must go well, which 0.5.17 asserts.
    def updated(self, body, **more):
        if body.get("flush_cache", True) and not self.flushed():
            if self.is_old:
                raise Ended("Cache flush failed after updating weights")
            return self.result(False, "Weights were updated, but the cache was not flushed", **more)
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
        return self.result(**more)

    # model_runner_components/weight_updater.py: the path is taken over first, so a failure reads the new one again.
    async def update_from_disk(self, body):
        await self.writing()
        try:
            self.load(body["model_path"])
        except Exception as error:
            return self.result(False, f"Failed to update weights: {error}", num_paused_requests=0)
        return self.updated(body, num_paused_requests=0)

    # entrypoints/http_server.py: no lock, no check of what the weights are.
    async def update_version(self, body):
        if body.get("abort_all_requests", True):
            for request in self.running:
                request["aborted"] = True
        self.version = body["new_version"]
        return self.result(new_version=self.version)

    async def check_weights(self, body):
        if body.get("action") != "checksum":
            return self.result(False, "unknown action")
        ranks = [
            {
                name: sha256(value.view(torch.uint8).numpy().tobytes()).hexdigest()
                for name, value in each.named_parameters()
            }
            for each in self.models
        ]
        return self.result(ranks=[{"checksums": checksums} for checksums in ranks])

    def serves(self, trainer):
        """Whether each rank has, bit for bit, what it would have had it loaded the trainer's weights."""
        for model in self.models:
            expected = Served(model.rank, self.num_ranks)
            expected.load_weights(trainer.state_dict().items())
            for name, value in expected.tensors().items():
                if not torch.equal(model.tensors()[name].view(torch.uint8), value.view(torch.uint8)):
                    return False
        return True

    def fresh_outputs(self, trainer, tokens, number):
        """What a server with the trainer's weights and an empty cache would generate."""
        other = object.__new__(Double)
        other.models = [Served(rank, self.num_ranks) for rank in range(self.num_ranks)]
        other.cache, other.keeps_prefixes = {}, True
        for model in other.models:
            model.load_weights(trainer.state_dict().items())
        tokens, kept, outputs = list(tokens), {}, []
        for _ in range(number):
            output = other.compute(tokens, kept)
            outputs.append(float(output.sum()))
            tokens.append(int(output.argmax()))
        return outputs
