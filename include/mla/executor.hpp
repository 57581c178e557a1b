#pragma once

#include <memory>

#include "mla/export.hpp"

namespace mla {

/// The threads of the CPU backend: a fixed crew that runs one function at a time on every worker.
/// The caller is worker 0. Calls from several threads take turns. Running allocates nothing.
class MLA_API Executor {
 public:
  /// num_threads >= 1; 0 takes the number of processors this process may use. Starts
  /// num_threads - 1 threads. Throws InvalidArgument (negative, more than 1024).
  explicit Executor(int num_threads = 0);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  int num_threads() const noexcept;

  /// Calls fn(worker) once for each worker in 0 .. num_threads - 1, and returns when all are done.
  /// fn must not throw nor call run on this executor. A forked process first starts new threads.
  template <class Fn>
  void run(const Fn& fn) {
    run_erased([](const void* context, int worker) { (*static_cast<const Fn*>(context))(worker); },
               &fn);
  }

  /// One crew for the whole process, with a thread for each processor it may use.
  static std::shared_ptr<Executor> shared();

 private:
  void run_erased(void (*call)(const void*, int), const void* context);

  struct Crew;
  std::unique_ptr<Crew> crew_;
};

}  // namespace mla
