"""The dialect ``torch``: plain, data-parallel and pipelined training on torch.distributed."""
