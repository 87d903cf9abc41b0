"""Learn to Pay Attention (Jetley, Lord, Lee and Torr, ICLR 2018)."""
