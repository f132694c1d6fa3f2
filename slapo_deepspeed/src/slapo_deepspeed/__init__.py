"""The dialect ``deepspeed``: ZeRO, pipelines and mixed precision on DeepSpeed's own engines."""
