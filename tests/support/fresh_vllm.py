"""A fresh vLLM for each checkpoint that is named on standard input: what it says goes to standard output.

A program of its own, since vLLM settles things for a whole process.
"""

import contextlib
import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    for line in sys.stdin:
        asked = json.loads(line)
        llm = LLM(
            asked["model"], dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=8,
            max_num_batched_tokens=256, kv_cache_memory_bytes=64 << 20,
        )  # fmt: skip
        sampling = SamplingParams(temperature=0, max_tokens=asked["num_tokens"], logprobs=3, ignore_eos=True)
        found = []
        for prompt in asked["prompts"]:
            (result,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
            tokens = list(result.outputs[0].token_ids)
            logprobs = [each[token].logprob for each, token in zip(result.outputs[0].logprobs, tokens, strict=True)]
            found.append([tokens, logprobs])
        print(json.dumps(found), file=answers, flush=True)
        del llm
        with contextlib.suppress(Exception):
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
