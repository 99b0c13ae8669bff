// CHECK: ends the process on a bug of ours, with the place and the values. Never reachable by
// outside input: what a user, a file or a peer can cause is a Status (base/status.h).
#pragma once

#include <sstream>
#include <string>

namespace fathom {

[[noreturn]] void CheckFailed(const char* file, int line, const std::string& what);

template <typename A, typename B>
std::string DescribeOperands(const char* expr, const A& a, const B& b) {
  std::ostringstream out;
  out << expr << " (" << a << " vs " << b << ")";
  return out.str();
}

}  // namespace fathom

#define CHECK(cond) \
  (static_cast<bool>(cond) ? void() : ::fathom::CheckFailed(__FILE__, __LINE__, #cond))
#define CHECK_OP(a, op, b)                         \
  (static_cast<bool>((a)op(b))                     \
       ? void()                                    \
       : ::fathom::CheckFailed(__FILE__, __LINE__, \
                               ::fathom::DescribeOperands(#a " " #op " " #b, a, b)))
#define CHECK_EQ(a, b) CHECK_OP(a, ==, b)
#define CHECK_NE(a, b) CHECK_OP(a, !=, b)
#define CHECK_LT(a, b) CHECK_OP(a, <, b)
#define CHECK_LE(a, b) CHECK_OP(a, <=, b)
#define CHECK_GT(a, b) CHECK_OP(a, >, b)
#define CHECK_GE(a, b) CHECK_OP(a, >=, b)
