// The bounds that keep one client from harming the others. Every one has a default that suits a
// public server of long prompts.
#pragma once

#include <chrono>
#include <cstdint>

namespace fathom::http {

struct Limits {
  int64_t max_body_bytes = 64 << 20;
  int64_t max_header_bytes = 32 << 10;  // request line and all fields
  int max_header_fields = 100;
  int64_t max_pipelined_bytes = 64 << 10;            // received while an answer is being made
  int64_t max_write_buffer_bytes = 1 << 20;          // of a stream that is read too slowly
  std::chrono::milliseconds header_timeout{10'000};  // from the first byte to the end of the header
  std::chrono::milliseconds idle_timeout{75'000};    // between requests
  std::chrono::milliseconds body_grace{10'000};      // then the body must come at the rate below
  int64_t min_body_bytes_per_second = 1024;
  std::chrono::milliseconds write_stall_timeout{
      30'000};  // a reader that takes nothing for so long is gone
};

}  // namespace fathom::http
