"""Learn to Pay Attention: the classifier that attends, and the networks it stands on."""
