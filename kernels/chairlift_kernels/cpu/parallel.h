// Work for torch's own OpenMP pool: tasks are taken one by one, so a core that is also serving clients takes fewer.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>

#define CHAIRLIFT_EXPORT extern "C" __attribute__((visibility("default")))

namespace chairlift {

// The caller's place in its team.
inline int thread_number() { return omp_get_thread_num(); }

// Every thread begins with the task of its own number, which may be on its way to that core already.
// `make_worker()` runs once per thread and returns a callable (task, next_task); next_task may be >= tasks.
// A team is either the whole pool or the caller alone: libgomp ends and restarts threads when sizes vary.
template <class MakeWorker>
void parallel_tasks(int threads, int64_t tasks, MakeWorker&& make_worker) {
  if (tasks <= 0) return;
  std::atomic<int64_t> taken{0};  // beyond the first of each thread
  const int team = tasks > 1 ? threads : 1;
#pragma omp parallel num_threads(team)
  {
    const int64_t first = omp_get_num_threads();
    int64_t task = thread_number();
    if (task < tasks) {
      auto worker = make_worker();
      while (task < tasks) {
        const int64_t next = first + taken.fetch_add(1, std::memory_order_relaxed);
        worker(task, next);
        task = next;
      }
    }
  }
}

// Splits [0, count) into pieces of `grain` and runs body(begin, end) on them.
template <class Body>
void parallel_ranges(int threads, int64_t count, int64_t grain, Body&& body) {
  const int64_t tasks = (count + grain - 1) / grain;
  parallel_tasks(threads, tasks, [&] {
    return [&](int64_t task, int64_t) {
      const int64_t begin = task * grain;
      const int64_t end = begin + grain < count ? begin + grain : count;
      body(begin, end);
    };
  });
}

struct FreeDeleter {
  void operator()(void* pointer) const { std::free(pointer); }
};

// Cache-line aligned, uninitialised.
template <class T>
using Buffer = std::unique_ptr<T[], FreeDeleter>;

template <class T>
Buffer<T> make_buffer(int64_t count) {
  const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  return Buffer<T>(static_cast<T*>(std::aligned_alloc(64, bytes ? bytes : 64)));
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Starts `lines` cache lines on their way to L2.
inline void prefetch_lines(const void* from, int lines) {
  const char* p = static_cast<const char*>(from);
  for (int i = 0; i < lines; ++i) __builtin_prefetch(p + i * 64, 0, 2);
}

}  // namespace chairlift
