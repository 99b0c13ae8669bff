#include "base/status.h"

namespace fathom {

int ExitCode(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return 0;
    case StatusCode::kInvalidArgument:
    case StatusCode::kNotFound:
      return 2;
    case StatusCode::kOutOfMemory:
      return 3;
    case StatusCode::kBadModel:
      return 4;
    case StatusCode::kDevice:
      return 5;
    case StatusCode::kPeer:
      return 6;
    case StatusCode::kInternal:
    case StatusCode::kUnavailable:
    case StatusCode::kCancelled:
      return 1;
  }
  return 1;
}

}  // namespace fathom
