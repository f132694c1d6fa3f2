"""GPT-Neo.

The steps are those of ``"auto"``. The file stays for what the key promises: a model of another family is refused, and of a
module that holds several models the right one is taken by ``prefix``. Kernels that its
attention cannot use are refused, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slapo_core import Schedule

from ..shared_steps.configuration import Configuration
from ..shared_steps.kernels import ATTENTIONS, attention_of
from ..shared_steps.transformer import schedule_blocks


def schedule(sch: Schedule, **options: Any) -> Schedule:
    """Schedule GPT-Neo, whose blocks are ``h``; it attends by its own code, which writes the attention out."""
    config = Configuration.read(sch, "gpt_neo", options)
    attention = attention_of(sch, config)
    if attention is not None and ATTENTIONS[attention] != "eager":
        message = f"GPT-Neo cannot attend by {attention!r}: its windows and its scale of 1 are in its own code"
        raise config.error(sch, f"{message}; leave attn_op_name and disable_flash_attn out, or give 'eager'")
    config = replace(config, attn_op_name=None, disable_flash_attn=None)
    return schedule_blocks(sch, config, "h")
