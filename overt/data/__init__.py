"""Files on disk become a `Batch`: one data set a file, nothing imported until it is asked for."""
