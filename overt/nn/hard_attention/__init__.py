"""Hard attention (HAN, AdaHAN): select cells by their norm and aggregate the kept ones."""
