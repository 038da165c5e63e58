// What this build needs from the operating system.
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

// Asks for 2 MB pages under memory not yet touched: blocks of a KV cache lie all over it, and walking the page tables
// to each 4 KB of a virtual machine's memory takes 8 to 12 % of decode attention (64 sequences of 200 tokens).
CHAIRLIFT_EXPORT void chairlift_prefer_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
  // A refusal is no error: the pages then keep their size.
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}
