"""Attention for Hopper (sm_90a) in Mosaic GPU: wgmma, TMA, warp specialisation."""
