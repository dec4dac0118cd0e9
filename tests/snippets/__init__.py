"""The code blocks and commands of README, CONTRIBUTING and docs/, taken out of their pages and tried.

A block is tried as it stands: Python runs, commands run and print what the page says they print, C++ compiles, JSON
parses. What cannot be tried everywhere carries a comment on the line before it:

- ``<!-- snippet: gpu -->``: tried where there is a GPU, by ``tests/gpu``; elsewhere compiled or parsed.
- ``<!-- snippet: slow -->``, ``varies``, ``network``, ``writes``: takes minutes, is about the machine, needs a network,
  or changes this tree; compiled or parsed only.
- ``<!-- snippet: file PATH -->``: lines of a file that is tried elsewhere.
- ``<!-- snippet: prose -->``: no code; for text alone.

``<!-- snippet: setup`` opens a comment of Python that readers do not see and that runs before what follows it, and
``setup cpp`` one of C++. A comment may go on after a comma with words for whoever edits the page. Blocks of one page
share their names, in order; those of C++ share what stands in such comments.
"""
