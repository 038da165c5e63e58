// What this build needs from the operating system.
#if defined(__linux__) && defined(__AMX_BF16__)
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
