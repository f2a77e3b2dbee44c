"""The only assignments to names of verl, vLLM and torch.

``registry`` says what a patch is and how it is guarded, ``catalog`` lists them all, and every other module here holds
one patch. Modules here import neither verl nor vLLM nor torch at module level.
"""
