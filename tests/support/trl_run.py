"""One training by TRL's AsyncGRPOTrainer on the CPU, as a program: its options are JSON, and so is what it prints last.

TRL wants CUDA in two places. What stands in for it there is all in `on_cpu`.
"""

import json
import logging
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCABULARY = 304


def even(completion_ids, **_):
    """A reward: the share of even tokens."""
    return [sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1) for tokens in completion_ids]


def save_policy(folder):
    """A tiny Qwen3 with a chat template, whose tokens are bytes, and words that are whole guesses.

    So a model that knows nothing plays, too.
    """
    import trl
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from deltawire_demo.wordle.words import WORDS
    from support.vllm_server import make_model

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *letters]
    tokens = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    calls = [json.dumps({"name": "guess", "arguments": {"word": word}}) for word in WORDS]
    whole = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    room = VOCABULARY - len(names) - len(TAGS)
    tokens.add_tokens([AddedToken(text, normalized=False) for text in TAGS + whole[:room]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()
    model = make_model(vocab_size=VOCABULARY, max_position_embeddings=4096)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def on_cpu():
    """What TRL asks of CUDA, in other ways: the speed of a GPU, and a kernel for attention."""
    from transformers import AttentionInterface
    from trl.experimental.async_grpo import async_grpo_trainer

    with mock.patch.object(async_grpo_trainer, "get_peak_flops_per_device", return_value=None):
        yield
    # The constructor registers TRL's own under this name.
    AttentionInterface.register("tree_fa3", attention)


def attention(module, query, key, value, mask, *, tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, scaling=None,
              **_):  # fmt: skip
    """Each segment of a row attends to its path from the root, which ends with itself."""
    import torch

    key, value = key.index_select(2, tree_kv_index), value.index_select(2, tree_kv_index)
    parts = []
    for segment in range(len(tree_cu_seqlens_q) - 1):
        own, path = (slice(*ends[segment : segment + 2].tolist()) for ends in (tree_cu_seqlens_q, tree_cu_seqlens_k))
        num_queries, num_keys = own.stop - own.start, path.stop - path.start
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, own], key[:, :, path], value[:, :, path], seen, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None


def settings(options):
    """What a test wants of AsyncGRPOConfig: small, on a CPU, and batches of a fixed size, or of what a server takes."""
    fixed = {} if "agent" in options else {"token_budget": 0}
    return fixed | {
        "learning_rate": 1e-5, "per_device_train_batch_size": 8, "num_generations": 8, "max_inflight_tasks": 16,
        "max_completion_length": 16, "queue_maxsize": 16, "logging_steps": 1, "report_to": "none",
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
        "save_strategy": "steps", "save_steps": options["steps"], "save_total_limit": 2,
    }  # fmt: skip


def simple_trainer(options):
    """Prompts of a letter, and a reward that is a function."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from deltawire.trainers.trl import DeltawireTransfer

    transfer = DeltawireTransfer(options["store"], engines=[options["server"]], **options["transfer"])
    prompts = [[{"role": "user", "content": letter}] for letter in "abcdefgh"]
    trainer = AsyncGRPOTrainer(
        model=options["model"],
        reward_funcs=even,
        args=AsyncGRPOConfig(
            options["output"], vllm_server_base_url=options["server"], max_steps=options["steps"],
            max_tool_calling_iterations=0, **settings(options),
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        weight_transfer=transfer,
    )  # fmt: skip
    transfer.attach(trainer)
    return trainer, transfer


def wordle_trainer(options):
    """The example's."""
    import trl_wordle

    names = [name for name in ("model", "store", "server", "agent", "env", "output") if name in options]
    given = [text for name in names for text in (f"--{name}", options[name])]
    parsed = trl_wordle.parse([*given, "--steps", str(options["steps"]), "--games", "8", "--max-lag", "1"])
    return trl_wordle.make_trainer(parsed, **settings(options))


def main(options):
    import torch
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    class Drain(TrainerCallback):
        """Takes samples that nobody will, without which TRL waits 15 seconds for its rollouts to end."""

        def on_train_end(self, *_, **__):
            threading.Thread(target=lambda: [trainer.rollout_queue.get() for _ in iter(int, 1)], daemon=True).start()

    logging.basicConfig(level=options.get("log_level", "WARNING"))
    torch.set_num_threads(1)
    with on_cpu():
        trainer, transfer = wordle_trainer(options) if "env" in options else simple_trainer(options)
    trainer.add_callback(Drain())
    trainer.train(resume_from_checkpoint=options.get("resume"))
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {name: value.detach().to(torch.bfloat16) for name, value in model.named_parameters()}
    save_file(weights, Path(options["output"]) / "final.safetensors")
    print(json.dumps({
        "history": trainer.state.log_history,
        "version": transfer.version,
        "served": {name: each.version for name, each in transfer.served.items()},
        "model_version": trainer.model_version,
        "syncs": transfer.num_syncs,
    }))  # fmt: skip


if __name__ == "__main__":
    sys.path += [str(ROOT / "examples")]
    main(json.loads(sys.argv[1]))
