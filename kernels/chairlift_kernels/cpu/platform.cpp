// What this build needs from the operating system.
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <chrono>

#include "matmul.h"

// Linux saves AMX tiles only for processes that asked. 0: granted or not needed.
CHAIRLIFT_EXPORT int chairlift_request_tiles() {
#if defined(__linux__) && defined(__AMX_BF16__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h
  return static_cast<int>(syscall(SYS_arch_prctl, kRequestPermission, kTileData));
#else
  return 0;
#endif
}

CHAIRLIFT_EXPORT const char* chairlift_instructions() {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  return "amx_bf16";
#elif defined(__AVX512BF16__)
  return "avx512_bf16";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "portable";
#endif
}

#if defined(__linux__) && defined(MADV_HUGEPAGE)
namespace {

constexpr uintptr_t kHugePage = 2 << 20;

// The part of some memory that consists of whole pages; a refusal to enlarge them is no error.
struct Pages {
  uintptr_t begin, end;

  Pages(void* memory, int64_t bytes, uintptr_t size)
      : begin((reinterpret_cast<uintptr_t>(memory) + size - 1) / size * size),
        end((reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / size * size) {}

  void prefer_huge() const {
    if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
};

Pages pages_of(void* memory, int64_t bytes) {
  return Pages(memory, bytes, static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)));
}

double seconds_to_touch(uintptr_t page) {
  const auto begin = std::chrono::steady_clock::now();
  *reinterpret_cast<volatile char*>(page) = 0;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace
#endif

// Asks for 2 MB pages under memory not yet touched.
CHAIRLIFT_EXPORT void chairlift_prefer_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  pages_of(memory, bytes).prefer_huge();
#else
  (void)memory, (void)bytes;
#endif
}

// The same for memory that is touched while requests wait, and only where such pages come quickly. Walking the page
// tables to each 4 KB of a virtual machine's memory takes 8 to 12 % of decode attention (64 sequences of 200 tokens).
// But a machine whose host takes back what is free gets a 2 MB page after 12 ms (elsewhere 0.2): eight prompts of
// 1,500 tokens in blocks never used before then took 1.5 times as long.
CHAIRLIFT_EXPORT void chairlift_prefer_quick_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr double kQuick = 2e-3;
  constexpr int kSamples = 32, kSlowOnes = 3;  // many: what another program has just freed comes quickly anywhere
  const Pages large(memory, bytes, kHugePage);
  uintptr_t page = large.begin;
  for (int i = 0, slow = 0; i < kSamples && page + kHugePage <= large.end; ++i, page += kHugePage) {
    Pages(reinterpret_cast<void*>(page), kHugePage, kHugePage).prefer_huge();
    slow += seconds_to_touch(page) > kQuick;
    if (slow == kSlowOnes) return;
  }
  pages_of(memory, bytes).prefer_huge();
#else
  (void)memory, (void)bytes;
#endif
}
