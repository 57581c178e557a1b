#pragma once

namespace mla::cli {

/// From here on an interrupt (SIGINT, SIGTERM) is noted, so that the command can end what it is at
/// and show what it has; a second one ends the program at once.
void catch_interrupts();

/// Whether one was noted.
bool interrupted();

}  // namespace mla::cli
