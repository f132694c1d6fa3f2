"""Replay of one training step of a pipeline, from the order of its actions and the seconds of each.

``pipeline_run`` plays the forwards, backwards and messages of all ranks of one pipeline; ``step`` adds the reduction of
gradients and the optimizer. An order of ``slapo_training.PipelineAction`` and numbers enter; times and a timeline in the format
of ``engine.timeline`` leave. It imports ``slapo_training`` alone.
"""

from .pipeline_run import PipelineRun, run_pipeline
from .step import SimulatedStep, StepCosts, simulate_step

__all__ = ["PipelineRun", "SimulatedStep", "StepCosts", "run_pipeline", "simulate_step"]
