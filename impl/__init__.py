"""Dynamic context parallelism on Megatron-Core, in the order a batch passes through it.

config     settings, checked when they are made
schedule   lengths → CP size → samples of every group
plan       which ranks run which samples, in which order: plain data
planner    lengths → the plan of a step, by the scheduler that the settings name
balance    the balanced scheduler; cost, packing and tiling are its parts
validate   whether a plan can be run
groups     a process group for every CP size
state      Megatron's model-parallel state and these groups, opened once
split      the whole batch → this rank's sub-batch
rules      what packs are padded to, and how sequences are cut
layout     which token sits in which row of which rank
pack       sequences ↔ packed rows, one index_select each way
thd        a sub-batch → one packed row with Megatron's parameters, and outputs back
forward    a micro-batch through a GPTModel
logprobs   log-probs and entropy from logits
loss       weights that make a masked loss a plain sum
merge      outputs of every group → the whole batch, in input order
totals     losses and metrics of every pack → those of the batch
engine     all of it as one training step on Megatron's schedules; scale, parallel, collectives
           and vocab_parallel are its parts
megatron/  everything that imports Megatron
"""
