"""Maps made from what was seen: rollout, gradients, values, flow; sinks; maps of CNNs."""
