"""Learned attention of "Learn To Pay Attention" (LTPA)."""
