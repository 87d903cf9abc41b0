"""Hard attention: which cells stay, what is made of them, and the networks of the paper."""
