"""Schedules: the cursor into a model, and how to start one."""

from slapo_core import Schedule, ScheduleMetadata, create_schedule, is_module_list, list_primitives

__all__ = ["Schedule", "ScheduleMetadata", "create_schedule", "is_module_list", "list_primitives"]
