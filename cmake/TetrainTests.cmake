# te_limit_tests(): no test of this folder may hang. The limits are several times what the slowest takes on a busy
# machine of two cores.
function(te_limit_tests)
  set(seconds 300)
  if(TE_SANITIZE)
    set(seconds 600)
  elseif(CMAKE_CROSSCOMPILING) # and emulated
    set(seconds 1800)
  endif()
  get_directory_property(tests TESTS)
  foreach(test IN LISTS tests)
    set_tests_properties(${test} PROPERTIES TIMEOUT ${seconds})
  endforeach()
endfunction()
