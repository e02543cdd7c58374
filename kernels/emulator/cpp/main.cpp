// Runs the kernels of ../../paged_attn.cu on this CPU for another process: reads jobs from standard
// input, writes the buffers they ask for to standard output, until the input ends.
//
// A job, little-endian: "JOB1", thread order, seed, block order, cp.async mode (u32 each); buffers
// (count u32; name, bytes u64, whether data follows u8, data); launches (count u32; kernel name,
// grid 3 u32, threads u32, shared bytes u32, argument count u32, arguments); buffers to return
// (count u32, index u32 each). A name is its length (u32) and bytes. An argument is a tag (u8) and a
// value: 0 buffer (index u32, offset u64), 1 null, 2 u32, 3 i64, 4 f32. The reply is "DONE" and
// the bytes. A buffer without data is filled with 0xFF: NaN in every element type.
#include <unistd.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "../../paged_attn.cu"

namespace {

void read_all(void* to, size_t n) {
  for (char* p = static_cast<char*>(to); n > 0;) {
    ssize_t got = read(0, p, n);
    if (got <= 0) emu::fail("the input ends within a job");
    p += got;
    n -= size_t(got);
  }
}
void write_all(const void* from, size_t n) {
  for (const char* p = static_cast<const char*>(from); n > 0;) {
    ssize_t put = write(1, p, n);
    if (put <= 0) emu::fail("the output is closed");
    p += put;
    n -= size_t(put);
  }
}
template <typename T>
T get() {
  T x;
  read_all(&x, sizeof x);
  return x;
}
std::string get_name() {
  std::string s(get<uint32_t>(), ' ');
  read_all(&s[0], s.size());
  return s;
}

struct Argument {
  uint8_t tag;
  uint64_t bits;
};
using Arguments = std::vector<Argument>;

// Argument `i` as the kernel's parameter type; a kind that does not fit is an error.
template <typename P>
P parameter(const char* kernel, const Arguments& arguments, size_t i) {
  const Argument& a = arguments[i];
  bool fits = std::is_pointer<P>::value          ? a.tag <= 1
              : std::is_same<P, uint32_t>::value ? a.tag == 2
              : std::is_same<P, int64_t>::value  ? a.tag == 3
              : std::is_same<P, float>::value    ? a.tag == 4
                                                 : false;
  if (!fits) emu::fail("%s: argument %zu has tag %d", kernel, i, a.tag);
  return emu::from_bits<P>(a.bits);
}
using Kernel = std::function<void(const Arguments&)>;
template <typename... P, size_t... I>
void call(const char* name, void (*f)(P...), const Arguments& arguments, std::index_sequence<I...>) {
  f(parameter<P>(name, arguments, I)...);
}
template <typename... P>
Kernel wrap(const char* name, void (*f)(P...)) {
  return [=](const Arguments& arguments) { call(name, f, arguments, std::index_sequence_for<P...>()); };
}
template <typename... P>
constexpr size_t arity(void (*)(P...)) {
  return sizeof...(P);
}
struct Entry {
  size_t parameters;
  Kernel run;
};

// clang-format off
#define ENTRY(name) {#name, {arity(name), wrap(#name, name)}},
#define ENTRIES_OF_CACHE(type)                                                      \
  ENTRY(write_kv_f32_##type) ENTRY(write_kv_f16_##type) ENTRY(write_kv_bf16_##type) \
  ENTRY(attend_simt_##type##_d64) ENTRY(attend_simt_##type##_d128)                  \
  ENTRY(attend_simt_##type##_d256) ENTRY(attend_simt_##type##_d512)
#define ENTRIES_OF_TENSOR_CORES(type)                                                            \
  ENTRY(decode_mma_##type##_d64) ENTRY(decode_mma_##type##_d128) ENTRY(decode_mma_##type##_d256) \
  ENTRY(decode_mma_wide_##type##_d64) ENTRY(decode_mma_wide_##type##_d128)                       \
  ENTRY(decode_mma_wide_##type##_d256)                                                           \
  ENTRY(prefill_mma_##type##_d64) ENTRY(prefill_mma_##type##_d128) ENTRY(prefill_mma_##type##_d256)
const std::map<std::string, Entry> kernels = {
    ENTRIES_OF_CACHE(f32) ENTRIES_OF_CACHE(f16) ENTRIES_OF_CACHE(bf16)
    ENTRIES_OF_TENSOR_CORES(f16) ENTRIES_OF_TENSOR_CORES(bf16)
    ENTRY(copy_blocks_b16) ENTRY(copy_blocks_b32) ENTRY(reduce) ENTRY(merge_states)};
// clang-format on

struct Buffer {
  char* start;
  size_t bytes;
};

void run_job() {
  emu::config.order = int(get<uint32_t>());
  emu::config.seed = get<uint32_t>();
  emu::config.block_order = int(get<uint32_t>());
  emu::config.cp_async = int(get<uint32_t>());
  std::vector<Buffer> buffers(get<uint32_t>());
  for (auto& buffer : buffers) {
    std::string name = get_name();
    buffer.bytes = get<uint64_t>();
    buffer.start = static_cast<char*>(emu::dev_alloc(name.c_str(), buffer.bytes));
    if (get<uint8_t>()) read_all(buffer.start, buffer.bytes);
  }
  for (uint32_t launches = get<uint32_t>(); launches > 0; launches--) {
    std::string name = get_name();
    dim3 grid;
    grid.x = get<uint32_t>();
    grid.y = get<uint32_t>();
    grid.z = get<uint32_t>();
    uint32_t threads = get<uint32_t>(), shared = get<uint32_t>();
    Arguments arguments(get<uint32_t>());
    for (auto& argument : arguments) {
      argument.tag = get<uint8_t>();
      argument.bits = 0;
      if (argument.tag == 0) {
        uint32_t index = get<uint32_t>();
        argument.bits = uint64_t(buffers.at(index).start) + get<uint64_t>();
      } else if (argument.tag == 3) {
        argument.bits = get<uint64_t>();
      } else if (argument.tag != 1) {
        argument.bits = get<uint32_t>();
      }
    }
    auto kernel = kernels.find(name);
    if (kernel == kernels.end()) emu::fail("no kernel %s", name.c_str());
    if (arguments.size() != kernel->second.parameters)
      emu::fail("%s takes %zu arguments, not %zu", name.c_str(), kernel->second.parameters, arguments.size());
    emu::launch(name.c_str(), grid, dim3(threads), shared, [&] { kernel->second.run(arguments); });
  }
  std::vector<Buffer> wanted;
  for (uint32_t n = get<uint32_t>(); n > 0; n--) wanted.push_back(buffers.at(get<uint32_t>()));
  write_all("DONE", 4);
  for (const auto& buffer : wanted) write_all(buffer.start, buffer.bytes);
  for (const auto& buffer : buffers) emu::dev_free(buffer.start);
}

}  // namespace

int main() {
  char magic[4];
  while (read(0, magic, 1) == 1) {
    read_all(magic + 1, 3);
    if (std::string(magic, 4) != "JOB1") emu::fail("not a job");
    run_job();
  }
}
