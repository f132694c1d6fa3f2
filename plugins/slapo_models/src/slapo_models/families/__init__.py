"""One file per model family: ``schedule(sch, **options)`` takes the steps of its ready schedule. In: a schedule and
the classic configuration names. Out: the same schedule with steps in its journal. May import ``shared_steps``.
"""

TESTED_FAMILIES = (
    *("albert", "bert", "clip", "deepseek_v3", "falcon", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox"),
    *("gpt_oss", "llama", "llama4_text", "llava", "mistral", "mixtral", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "roberta", "t5", "vit", "whisper"),
)
"""Transformers' ``model_type`` of the families whose schedules the tests verify."""
