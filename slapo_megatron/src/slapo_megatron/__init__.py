"""The Megatron-Core dialect for Slapo."""
