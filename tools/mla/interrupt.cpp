#include "mla/interrupt.hpp"

#include <csignal>

namespace mla::cli {
namespace {

volatile std::sig_atomic_t interrupt_seen = 0;

void on_interrupt(int signal) {
  interrupt_seen = 1;
  std::signal(signal, SIG_DFL);
}

}  // namespace

void catch_interrupts() {
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGTERM, on_interrupt);
}

bool interrupted() { return interrupt_seen != 0; }

}  // namespace mla::cli
