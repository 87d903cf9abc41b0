"""Self Supervision for Attention Networks (Patro et al., WACV 2021)."""
