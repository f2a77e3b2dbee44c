"""Numbers and tables of the documents, made from result files and from the code: `python -m scripts.claims`.

A document holds `<!-- r: NAME WORD.. -->`, what the function NAME made of the words, and `<!-- /r -->`. Marks on lines
of their own hold a table, marks inside a line hold words of its sentence. A new number is a new function with `@claim`.
"""
