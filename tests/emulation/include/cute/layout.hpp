// Layouts of two dimensions, as far as tiles use them.
#pragma once

namespace cute {

template <int N>
struct Int {
  static constexpr int value = N;
};
template <typename... Extents>
struct Shape {};
template <typename... Steps>
struct Stride {};
template <typename Shape, typename Stride>
struct Layout;
template <typename Shape, int Row, int Column>
struct Layout<Shape, Stride<Int<Row>, Int<Column>>> {
  constexpr int operator()(int row, int column) const { return row * Row + column * Column; }
};

}  // namespace cute
