"""`bloomery doctor --gpu-check`: what a GPU that is lent for half an hour can prove, correctness before speed."""
