// Copies of tiles by TMA: descriptors, loads that a barrier counts, stores in groups.
#include <cuda.h>

#include <cstring>

#include "machine.h"

namespace emulation {

namespace {

static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Visits the rows of a tile, 128 bytes each: its index, and where it lies in the tensor, or null outside.
template <typename Visit>
void visit_rows(TensorMap const& tensor, std::vector<int> const& coordinates, Visit&& visit) {
  uint32_t rows = 1;
  for (int d = 1; d < tensor.rank; ++d) rows *= tensor.tile[d];
  for (uint32_t row = 0; row < rows; ++row) {
    char* at = tensor.data;
    bool inside = true;
    uint32_t rest = row;
    for (int d = 1; d < tensor.rank; ++d) {
      int64_t const place = int64_t(coordinates[size_t(d)]) + rest % tensor.tile[d];
      rest /= tensor.tile[d];
      inside &= place >= 0 && place < int64_t(tensor.sizes[d]);
      at += place * int64_t(tensor.strides[d]);
    }
    visit(row, inside ? at : nullptr);
  }
}
uint32_t tile_rows(TensorMap const& tensor) {
  uint32_t rows = 1;
  for (int d = 1; d < tensor.rank; ++d) rows *= tensor.tile[d];
  return rows;
}
// Elements of a row's 16-byte chunk that exist: bytes from its start on, with the tensor's edges.
uint32_t bytes_inside(TensorMap const& tensor, int column) {
  if (column < 0) fault("a TMA tile starts at column %d", column);
  uint64_t const size = tensor.sizes[0];
  uint32_t const per_chunk = uint32_t(16 / tensor.element_bytes);
  if (uint64_t(column) >= size) return 0;
  return uint32_t(std::min<uint64_t>(per_chunk, size - uint64_t(column))) * uint32_t(tensor.element_bytes);
}
void check_address(uint32_t address) {
  if (address % 128 != 0) fault("a TMA tile at %#x is not aligned", address);
}

void load_tensor_into(Cta& cta, uint32_t target, TensorMap const& tensor, uint32_t barrier,
                      std::vector<int> const& coordinates) {
  check_address(target);
  MBarrier const& counted = cta.memory.barrier(barrier);
  Moment const done{counted.actor, uint32_t(counted.phase + 1)};
  uint32_t const rows = tile_rows(tensor), row_bytes = tensor.tile[0] * uint32_t(tensor.element_bytes);
  for (uint32_t at = 0; at < rows * row_bytes; at += 16) {
    cta.memory.will_write(swizzled(target + at), done, "a TMA load");
    std::memset(cta.memory.raw(swizzled(target + at), 16, "a TMA load"), 0xff, 16);
  }
  ++cta.events;
  later([&cta, tensor, target, barrier, coordinates, rows, row_bytes] {
    visit_rows(tensor, coordinates, [&](uint32_t row, char const* source) {
      for (uint32_t byte = 0; byte < row_bytes; byte += 16) {
        uint32_t const address = swizzled(target + row * row_bytes + byte);
        int const column = coordinates[0] + int(byte) / tensor.element_bytes;
        uint32_t const bytes = source == nullptr ? 0 : bytes_inside(tensor, column);
        char* const chunk = cta.memory.raw(address, 16, "a TMA load");
        std::memset(chunk, 0, 16);
        if (bytes > 0) std::memcpy(chunk, source + int64_t(column) * tensor.element_bytes, bytes);
        cta.memory.has_written(address);
      }
    });
    --cta.events;
    complete_bytes(cta, barrier, int64_t(rows) * row_bytes);
  });
}

}  // namespace

void load_tensor(uint32_t target, TensorMap const& tensor, uint32_t barrier, std::vector<int> const& coordinates) {
  load_tensor_into(*current->cta, target, tensor, barrier, coordinates);
  maybe_yield();
}
void load_tensor_multicast(uint32_t target, TensorMap const& tensor, uint32_t barrier,
                           std::vector<int> const& coordinates, uint32_t ranks) {
  auto const& ctas = current->cta->cluster->ctas;
  if (ranks == 0 || ranks >> ctas.size() != 0) fault("a multicast to ranks %#x of %zu", ranks, ctas.size());
  for (size_t rank = 0; rank < ctas.size(); ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    if (ctas[rank] == nullptr) fault("a multicast to CTA %zu of the cluster, which has ended", rank);
    load_tensor_into(*ctas[rank], target, tensor, barrier, coordinates);
  }
  maybe_yield();
}

void load_bytes(uint32_t target, char const* source, uint32_t bytes, uint32_t barrier) {
  if (target % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    fault("a bulk copy of %u bytes to %#x", bytes, target);
  }
  Cta& cta = *current->cta;
  MBarrier const& counted = cta.memory.barrier(barrier);
  Moment const done{counted.actor, uint32_t(counted.phase + 1)};
  for (uint32_t at = 0; at < bytes; at += 16) {
    cta.memory.will_write(target + at, done, "a bulk copy");
    std::memset(cta.memory.raw(target + at, 16, "a bulk copy"), 0xff, 16);
  }
  ++cta.events;
  later([&cta, target, source, bytes, barrier] {
    for (uint32_t at = 0; at < bytes; at += 16) {
      std::memcpy(cta.memory.raw(target + at, 16, "a bulk copy"), source + at, 16);
      cta.memory.has_written(target + at);
    }
    --cta.events;
    complete_bytes(cta, barrier, bytes);
  });
  maybe_yield();
}

namespace {

// A store of the thread's open group begins, and ends: when its reads count as done, and the group's count of stores.
std::pair<Moment, std::shared_ptr<int>> begin_store(Thread& self) {
  if (self.store_actor == 0) self.store_actor = self.cta->new_actor();
  if (self.open_stores == nullptr) self.open_stores = std::make_shared<int>(0);
  ++*self.open_stores;
  ++self.cta->events;
  return {{self.store_actor, uint32_t(self.store_groups.size() + 1)}, self.open_stores};
}
void end_store(Thread& self, std::shared_ptr<int> const& group) {
  --self.cta->events;
  --*group;
  self.store_queue.wake();
}

}  // namespace

void store_tensor(TensorMap const& tensor, uint32_t source, std::vector<int> const& coordinates) {
  check_address(source);
  Thread& self = *current;
  Cta& cta = *self.cta;
  uint32_t const rows = tile_rows(tensor), row_bytes = tensor.tile[0] * uint32_t(tensor.element_bytes);
  auto const [done, group] = begin_store(self);
  for (uint32_t at = 0; at < rows * row_bytes; at += 16) {
    cta.memory.will_read(swizzled(source + at), done, "a TMA store's read");
  }
  later([&cta, tensor, &self, group = group, source, coordinates, row_bytes] {
    visit_rows(tensor, coordinates, [&](uint32_t row, char* target) {
      for (uint32_t byte = 0; byte < row_bytes; byte += 16) {
        uint32_t const address = swizzled(source + row * row_bytes + byte);
        int const column = coordinates[0] + int(byte) / tensor.element_bytes;
        uint32_t const bytes = target == nullptr ? 0 : bytes_inside(tensor, column);
        if (bytes > 0) {
          std::memcpy(target + int64_t(column) * tensor.element_bytes, cta.memory.raw(address, 16, "a TMA store"),
                      bytes);
        }
        cta.memory.has_read(address);
      }
    });
    end_store(self, group);
  });
}
static void send_floats(float* target, uint32_t source, uint32_t bytes, bool adds) {
  if (source % 16 != 0 || reinterpret_cast<uintptr_t>(target) % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    fault("a bulk copy or reduction of %u bytes from %#x", bytes, source);
  }
  Thread& self = *current;
  Cta& cta = *self.cta;
  auto const [done, group] = begin_store(self);
  for (uint32_t at = 0; at < bytes; at += 16) cta.memory.will_read(source + at, done, "a bulk store's read");
  later([&cta, &self, group = group, target, source, bytes, adds] {
    for (uint32_t at = 0; at < bytes; at += 16) {
      auto const* const floats = reinterpret_cast<float const*>(cta.memory.raw(source + at, 16, "a bulk store"));
      for (int i = 0; i < 4; ++i) target[at / 4 + i] = (adds ? target[at / 4 + i] : 0.0f) + floats[i];
      cta.memory.has_read(source + at);
    }
    end_store(self, group);
  });
}
void reduce_bytes(float* target, uint32_t source, uint32_t bytes) { send_floats(target, source, bytes, true); }
void store_bytes(float* target, uint32_t source, uint32_t bytes) { send_floats(target, source, bytes, false); }
void commit_stores() {
  Thread& self = *current;
  if (self.open_stores == nullptr) self.open_stores = std::make_shared<int>(0);
  self.store_groups.push_back(std::move(self.open_stores));
  self.open_stores = nullptr;
}
void wait_stores(int pending) {
  Thread& self = *current;
  maybe_yield();
  auto done = [&] {
    for (size_t i = 0; i + size_t(pending) < self.store_groups.size(); ++i) {
      if (*self.store_groups[i] > 0) return false;
    }
    return true;
  };
  wait_until(self.store_queue, done, "its TMA stores but %d groups", pending);
  if (self.store_actor != 0 && self.store_groups.size() > size_t(pending)) {
    self.clock.learn({self.store_actor, uint32_t(self.store_groups.size() - size_t(pending))});
  }
}

}  // namespace emulation

extern "C" CUresult emulation_encode_tiled(CUtensorMap* descriptor, CUtensorMapDataType type, cuuint32_t rank,
                                           void* data, cuuint64_t const* sizes, cuuint64_t const* strides,
                                           cuuint32_t const* tile, cuuint32_t const* steps, CUtensorMapInterleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill fill) {
  emulation::TensorMap tensor{};
  tensor.data = static_cast<char*>(data);
  tensor.rank = int(rank);
  bool const half = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  tensor.element_bytes = half ? 2 : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 0;
  bool valid = tensor.element_bytes > 0 && rank >= 1 && rank <= 5 && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
               fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (cuuint32_t d = 0; valid && d < rank; ++d) {
    tensor.sizes[d] = sizes[d];
    tensor.strides[d] = d == 0 ? cuuint64_t(tensor.element_bytes) : strides[d - 1];
    tensor.tile[d] = tile[d];
    valid = sizes[d] >= 1 && sizes[d] <= (cuuint64_t(1) << 32) && tile[d] >= 1 && tile[d] <= 256 && steps[d] == 1 &&
            (d == 0 || tensor.strides[d] % 16 == 0);
  }
  // Rows of a tile are as wide as the swizzle.
  valid = valid && tile[0] * cuuint32_t(tensor.element_bytes) == 128;
  std::memcpy(static_cast<void*>(descriptor), &tensor, sizeof(tensor));
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
