"""Plan of an export, the same on every rank: the origin of each tensor, the ranks that send its parts, and the file it
goes to. In: the pieces that each rank holds and the unmodified model. Out: a ``Plan``; no data is sent here. May import
``huggingface``, ``tensor_views`` and ``safetensors_files``.

The unmodified model is built again from its config on the meta device. It says which names exist, which name of a tied
parameter is written, and how rows of a vocabulary were padded; Transformers' own conversion is run on it to see which
tensors belong together. Every rank makes the same plan: from which boxes of which ranks each tensor is assembled, and
into which file it goes. Then the tensors go to the first rank, some megabytes at a time. Everything that may fail is
done before the first message, and told on all ranks, so no rank waits for a message that does not come.
"""
