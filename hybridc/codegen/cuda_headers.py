"""Headers of generated CUDA C: instructions that C++ has no names for, and what TVM takes of CUDA's C++
library, in a few lines.

The library's own headers cost NVRTC a second for each architecture, a common kernel 0.03 s.
"""

from pathlib import Path

_NATIVE = Path(__file__).parent / "native"
_TYPES = """\
#pragma once
namespace cuda { namespace std {
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
} }
"""
_TRAITS = """\
#pragma once
namespace cuda { namespace std {
template <bool B> struct bool_constant { static constexpr bool value = B; };
template <class T, class U> struct is_same : bool_constant<false> {};
template <class T> struct is_same<T, T> : bool_constant<true> {};
template <class T, class U> inline constexpr bool is_same_v = is_same<T, U>::value;
template <bool B, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <class T, class... Others> inline constexpr bool is_one_of = (is_same_v<T, Others> || ...);
template <class T> struct is_floating_point : bool_constant<is_one_of<T, float, double>> {};
template <class T> struct is_signed_integral : bool_constant<
    is_one_of<T, signed char, short, int, long, long long>> {};
template <class T> struct is_unsigned : bool_constant<
    is_one_of<T, bool, unsigned char, unsigned short, unsigned int, unsigned long, unsigned long long>> {};
template <class T> struct is_signed : bool_constant<
    is_floating_point<T>::value || is_signed_integral<T>::value || is_same_v<T, char>> {};
template <class T> struct is_integral : bool_constant<
    is_signed_integral<T>::value || is_unsigned<T>::value || is_same_v<T, char>> {};
} }
"""
LIBRARY_HEADERS = {"cuda/std/cstdint": _TYPES, "cuda/std/type_traits": _TRAITS}
"""Texts by the names under which they are included; so are the following."""
HEADERS = {
    **LIBRARY_HEADERS,
    **{f"hybridc/{name}": (_NATIVE / name).read_text() for name in ("mma.h", "async_copy.h")},
}
"""Texts by the names under which they are included."""
