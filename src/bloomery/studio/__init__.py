"""`bloomery studio`: a page in the browser that shows runs and starts commands. Does not import torch."""
