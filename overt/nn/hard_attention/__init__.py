"""Hard attention (HAN, AdaHAN): select cells by their norm and aggregate the kept ones.

`overt.nn.HardAttention` is the module to use in a model. `overt.nn.keep_top`, `keep_share` and
`keep_above_uniform` are its rules; `selection` has further rules, controls and weights in training.
"""
