/* Reads memory as fast as one core can: sums of 64-bit words, with the lines to come fetched ahead. */
#include <stddef.h>
#include <stdint.h>

uint64_t read_memory(const uint64_t *words, size_t bytes) {
  enum { kLine = 8, kAhead = 16 << 10 }; /* words in a cache line; bytes */
  uint64_t sums[4 * kLine] = {0};
  for (size_t i = 0; i < bytes / 8; i += 4 * kLine) {
    for (int line = 0; line < 4; ++line)
      __builtin_prefetch((const char *)(words + i + line * kLine) + kAhead, 0, 2);
    for (int lane = 0; lane < 4 * kLine; ++lane) sums[lane] += words[i + lane];
  }
  uint64_t sum = 0;
  for (int lane = 0; lane < 4 * kLine; ++lane) sum += sums[lane];
  return sum;
}
