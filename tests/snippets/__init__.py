"""The code blocks and commands of README, CONTRIBUTING and docs/, extracted from their pages and tested.

A block is tested as written: Python runs, commands run and print the output shown in the page, C++ compiles, JSON
parses. A block that cannot be tested everywhere has a mark, a comment on the line before it:

- ``<!-- snippet: gpu -->``: tested by ``tests/gpu`` on a machine with a GPU; elsewhere compiled or parsed.
- ``<!-- snippet: slow -->``, ``varies``, ``network``, ``writes``: takes minutes, depends on the machine, needs a
  network, or changes this tree; compiled or parsed only.
- ``<!-- snippet: file PATH -->``: lines of a file that is tested elsewhere.
- ``<!-- snippet: prose -->``: text without code.

``<!-- snippet: setup`` opens a comment with Python that readers do not see and that runs before the blocks below, and
``setup cpp`` a comment with C++. After a comma a mark may continue with a note for editors of the page. Python blocks
of one page share their names, in order; C++ blocks share the code of the setup comments.
"""
